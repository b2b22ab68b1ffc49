// quire.schedule.group_lists: the lists of requests: the queue, the running requests, the pinned prefixes. **Owns** their groups.
export module quire.schedule.group_lists;

import quire.core.base;
import quire.paging.snapshot;
import quire.schedule.sequence;

export namespace quire {

class GroupLists {
public:
    using Group = std::unique_ptr<SequenceGroup>;

    // `max_sequences`: of the running groups together.
    explicit GroupLists(int max_sequences);

    // The queue and the running groups are in the order of their keys.
    SequenceGroup*         first_waiting() const { return queue_.empty() ? nullptr : queue_.begin()->second.get(); }
    std::span<const Group> running() const { return running_; }
    std::span<const Group> pinned() const { return pinned_; }
    int                    n_waiting() const { return int(queue_.size()); } // including preempted groups
    int                    n_swapped() const { return n_swapped_; }         // of these
    int                    n_sequences() const { return n_sequences_; }     // that running groups can have at once
    SequenceGroup*         find(RequestId id) const;                        // null: there is none
    // Whether a group can run beside the first n_staying running groups: they have places for its sequences.
    bool has_places(const SequenceGroup& group, std::size_t n_staying) const;

    void  add(Group group);             // to the queue
    Group remove(SequenceGroup& group); // from its list
    void  start_first();                // the first group of the queue runs from now on
    void  to_queue(std::size_t i);      // running group i waits from now on
    void  pin(SequenceGroup& group);    // a running group

    // Appends all sequences to a snapshot.
    void view(const BlockManager& blocks, Snapshot& snapshot) const;
    void check_invariants(const BlockManager& blocks) const;

private:
    static auto place_of(std::vector<Group>& list, const SequenceGroup& group) {
        return std::ranges::find(list, &group, &Group::get);
    }

    std::map<QueueKey, Group>                     queue_;
    std::vector<Group>                            running_, pinned_;
    std::unordered_map<RequestId, SequenceGroup*> index_; // of all lists
    int                                           max_sequences_, n_sequences_ = 0, n_swapped_ = 0;
};

} // namespace quire

module :private;

namespace quire {

GroupLists::GroupLists(int max_sequences) : max_sequences_(max_sequences) {
    running_.reserve(std::size_t(max_sequences));
}

SequenceGroup* GroupLists::find(RequestId id) const {
    const auto found = index_.find(id);
    return found == index_.end() ? nullptr : found->second;
}

bool GroupLists::has_places(const SequenceGroup& group, std::size_t n_staying) const {
    int width = n_sequences_ + group.request.width();
    for (std::size_t i = n_staying; i < running_.size(); i++) width -= running_[i]->request.width();
    return width <= max_sequences_;
}

void GroupLists::add(Group group) {
    index_.emplace(group->id, group.get());
    const QueueKey key = group->key;
    queue_.emplace(key, std::move(group));
}

GroupLists::Group GroupLists::remove(SequenceGroup& group) {
    index_.erase(group.id);
    if (const auto at = queue_.find(group.key); at != queue_.end()) {
        n_swapped_ -= group.status == GroupStatus::swapped;
        return std::move(queue_.extract(at).mapped());
    }
    Group owned;
    for (std::vector<Group>* list : {&running_, &pinned_}) {
        const auto at = place_of(*list, group);
        if (at == list->end()) continue;
        if (list == &running_) n_sequences_ -= group.request.width();
        owned = std::move(*at);
        list->erase(at);
        break;
    }
    return owned;
}

void GroupLists::start_first() {
    Group group = std::move(queue_.extract(queue_.begin()).mapped());
    n_sequences_ += group->request.width();
    n_swapped_ -= group->status == GroupStatus::swapped;
    group->status = GroupStatus::running;
    const auto at = std::ranges::find_if(running_, [&](const Group& g) { return group->key < g->key; });
    running_.insert(at, std::move(group));
}

void GroupLists::to_queue(std::size_t i) {
    Group group = std::move(running_[i]);
    running_.erase(running_.begin() + std::ptrdiff_t(i));
    n_sequences_ -= group->request.width();
    n_swapped_ += group->status == GroupStatus::swapped;
    const QueueKey key = group->key;
    queue_.emplace(key, std::move(group));
}

void GroupLists::pin(SequenceGroup& group) {
    const auto at = place_of(running_, group);
    check(at != running_.end(), "a request that does not run was pinned");
    n_sequences_ -= group.request.width();
    pinned_.push_back(std::move(*at));
    running_.erase(at);
}

void GroupLists::view(const BlockManager& blocks, Snapshot& snapshot) const {
    for (const Group& group : pinned_) quire::view(*group, ViewStatus::pinned, blocks, snapshot);
    for (const Group& group : running_) quire::view(*group, ViewStatus::running, blocks, snapshot);
    for (const auto& [key, group] : queue_)
        quire::view(*group,
                    group->status == GroupStatus::swapped     ? ViewStatus::swapped
                    : group->status == GroupStatus::preempted ? ViewStatus::preempted
                                                              : ViewStatus::waiting,
                    blocks, snapshot);
}

void GroupLists::check_invariants(const BlockManager& blocks) const {
    int sequences = 0;
    check(n_swapped_ == int(std::ranges::count_if(
                            queue_, [](const auto& one) { return one.second->status == GroupStatus::swapped; })),
          "the count of swapped requests is wrong");
    check(queue_.size() + running_.size() + pinned_.size() == index_.size(), "a request is lost, or in two places");
    for (std::size_t i = 0; i < running_.size(); i++) {
        const SequenceGroup& group = *running_[i];
        sequences += group.request.width();
        check(group.status == GroupStatus::running, "a request among the running ones does not run");
        check(i == 0 || running_[i - 1]->key < group.key, "running requests are not in the order of their keys");
        for (const auto& s : group.sequences) {
            const int have = blocks.n_entries(s->table);
            check(have >= blocks.entries_for(s->n_computed), "a sequence has fewer blocks than its tokens need");
            check(have <= blocks.entries_for(int(s->tokens.size()) + s->n_drafts),
                  "a sequence has more blocks than its tokens need");
            check(!blocks.is_swapped(s->table), "a running sequence is swapped out");
        }
    }
    check(sequences == n_sequences_ && sequences <= max_sequences_, "more sequences run than may");
    for (const auto& [key, group] : queue_)
        for (const auto& s : group->sequences) {
            const bool swapped = group->status == GroupStatus::swapped;
            check((s->table >= 0) == swapped, "swapped: all sequences of a request, or none");
            check(!swapped || blocks.is_swapped(s->table), "a swapped sequence has blocks on the device");
        }
}

} // namespace quire
