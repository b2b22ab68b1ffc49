// quire.core.may_fail: what an allocation does that finds no memory, in a thread that serves one request: it throws, and the request fails; or
// it waits (quire.serve.memory_reserve), where code must not throw. **Owns** a flag for each thread.
export module quire.core.may_fail;

import quire.core.std;

export namespace quire {

// Whether an allocation of this thread that finds no memory throws at once.
bool may_fail();

// While this object lives, an allocation of its thread that finds no memory throws at once (`may`), or is waited for (not `may`).
class MayFail {
public:
    explicit MayFail(bool may);
    ~MayFail();
    MayFail(const MayFail&)            = delete;
    MayFail& operator=(const MayFail&) = delete;

private:
    bool before_;
};

} // namespace quire

module :private;

namespace quire {

static thread_local bool allowed = false; // static: clang 19 defines others in the importers, too

bool may_fail() { return allowed; }

MayFail::MayFail(bool may) : before_(allowed) { allowed = may; }
MayFail::~MayFail() { allowed = before_; }

} // namespace quire
