// quire.serve.api.request_token_cache: token lists that requests ask for by texts, where making one takes a pass over the whole vocabulary. **Owns** the
// lists that were made last.
export module quire.serve.api.request_token_cache;

import quire.constraint.reasoning_budget;
import quire.core.base;
import quire.core.recent;
import quire.schedule.sequence_breakers;
import quire.text.calls.reasoning_form;
import quire.text.tokens.breaker_sequences;

export namespace quire {

// Any thread. The tokenizer must outlive it.
class RequestTokenCache {
public:
    explicit RequestTokenCache(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

    std::shared_ptr<const SequenceBreakers> breakers(const std::vector<std::string>& texts);
    // Of the server's chat template.
    std::shared_ptr<const ReasoningMarks> reasoning_marks(const ReasoningForm& form);

private:
    static constexpr std::size_t most = 16;

    const Tokenizer*                                                          tokenizer_;
    std::mutex                                                                mutex_;
    Recent<std::vector<std::string>, std::shared_ptr<const SequenceBreakers>> breakers_{most};
    std::shared_ptr<const ReasoningMarks>                                     marks_;
};

} // namespace quire

module :private;

namespace quire {

// The lock is held while a list is made: of several requests that need one list, one request makes it and the others wait.
std::shared_ptr<const SequenceBreakers> RequestTokenCache::breakers(const std::vector<std::string>& texts) {
    std::scoped_lock lock(mutex_);
    if (const auto* known = breakers_.find(texts)) return *known;
    auto made = std::make_shared<const SequenceBreakers>(breaker_sequences(texts, *tokenizer_));
    return breakers_.add(texts, std::move(made), [](auto&) {});
}

std::shared_ptr<const ReasoningMarks> RequestTokenCache::reasoning_marks(const ReasoningForm& form) {
    std::scoped_lock lock(mutex_);
    if (!marks_) marks_ = std::make_shared<const ReasoningMarks>(form.begin, form.end, *tokenizer_);
    return marks_;
}

} // namespace quire
