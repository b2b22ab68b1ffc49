// quire.serve.models.leaving: which loaded models leave, so that another one finds room: the models used least recently, none that
// answers. Owns nothing.
export module quire.serve.models.leaving;

import quire.core.base;

export namespace quire {

// A loaded model.
struct Resident {
    std::size_t   bytes     = 0; // that are free again when the model leaves
    std::uint64_t last_used = 0; // a larger number is later
    bool          answers   = false;
};

struct RoomAsked {
    std::size_t bytes = 0; // that the new model needs
    std::size_t free  = 0; // that are free now
    int         most  = 0; // models at once; 0: any number
};

enum class NoRoom : std::uint8_t {
    too_large, // even if all leave
    answering, // models that would have to leave answer requests
};

// The places in `loaded` of the models that leave, the least recently used first. A model stays where the others that leave make enough room.
std::expected<std::vector<std::size_t>, NoRoom> choose_leaving(std::span<const Resident> loaded,
                                                               const RoomAsked&          asked);

} // namespace quire

module :private;

namespace quire {

std::expected<std::vector<std::size_t>, NoRoom> choose_leaving(std::span<const Resident> loaded,
                                                               const RoomAsked&          asked) {
    std::size_t all = asked.free;
    for (const Resident& one : loaded) all += one.bytes;
    if (asked.bytes > all) return std::unexpected(NoRoom::too_large);

    std::vector<std::size_t> order, leave;
    for (std::size_t i = 0; i < loaded.size(); i++)
        if (!loaded[i].answers) order.push_back(i);
    std::ranges::sort(order, std::less<>(), [&](std::size_t i) { return std::pair(loaded[i].last_used, i); });

    std::size_t free   = asked.free;
    const auto  enough = [&](std::size_t bytes, std::size_t n_leave) {
        return bytes >= asked.bytes && (asked.most == 0 || loaded.size() - n_leave < std::size_t(asked.most));
    };
    for (std::size_t i : order) {
        if (enough(free, leave.size())) break;
        leave.push_back(i);
        free += loaded[i].bytes;
    }
    if (!enough(free, leave.size())) return std::unexpected(NoRoom::answering);
    for (std::size_t at = leave.size(); at-- > 0;) // the most recently used first
        if (enough(free - loaded[leave[at]].bytes, leave.size() - 1)) {
            free -= loaded[leave[at]].bytes;
            leave.erase(leave.begin() + std::ptrdiff_t(at));
        }
    return leave;
}

} // namespace quire
