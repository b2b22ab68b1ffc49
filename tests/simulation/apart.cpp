// Processes that run scenarios, and the search for a smaller one.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "apart.h"

namespace quire::simulation {

namespace {

constexpr unsigned patience = 120; // seconds for one seed, which takes milliseconds: whoever needs them does not end

// The report of a child, in a file without a name.
class Notes {
public:
    Notes() : file_(std::tmpfile()) {
        if (!file_) throw std::runtime_error("no temporary file can be made");
    }
    Notes(Notes&& other) noexcept : file_(std::exchange(other.file_, nullptr)) {}
    Notes& operator=(Notes&&) = delete;
    ~Notes() {
        if (file_) std::fclose(file_);
    }
    int         descriptor() const { return fileno(file_); }
    std::string text() const {
        std::string out;
        std::rewind(file_);
        char buffer[4096];
        for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, file_)) > 0;) out.append(buffer, n);
        return out;
    }

private:
    std::FILE* file_;
};

void say(const std::string& text) {
    for (std::size_t done = 0; done < text.size();) {
        const ssize_t n = write(STDERR_FILENO, text.data() + done, text.size() - done);
        if (n <= 0) return;
        done += std::size_t(n);
    }
}

// Runs in a child whose standard error is the notes; returns its process.
pid_t start(const Notes& notes, const std::function<int()>& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("no process can be started");
    if (child > 0) return child;
    dup2(notes.descriptor(), STDERR_FILENO);
    int code = 1;
    try {
        code = body();
    } catch (const std::exception& e) {
        say(e.what());
    }
    std::fflush(nullptr);
    _exit(code);
}

std::string death(int status, const Notes& notes) {
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
    std::string text = notes.text();
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (!WIFSIGNALED(status)) return text.empty() ? "it failed without a word" : text;
    if (WTERMSIG(status) == SIGALRM) return cat("it does not end within ", patience, " s");
    return text.empty() ? cat("ended by signal ", WTERMSIG(status)) : text;
}

} // namespace

std::string in_process(const std::function<std::string()>& body) {
    const Notes notes;
    const pid_t child  = start(notes, [&] {
        alarm(patience);
        const std::string wrong = body();
        say(wrong);
        return wrong.empty() ? 0 : 1;
    });
    int         status = 0;
    waitpid(child, &status, 0);
    return death(status, notes);
}

Finding run_seeds(const Seeds& seeds, const std::function<std::vector<Part>(std::uint64_t)>& parts,
                  const std::function<Verdict(std::uint64_t, Part)>& body) {
    // Shared by the processes: the last seed to run, and the seed that each runs now, in which part.
    struct Shared {
        std::atomic<std::uint64_t> end;
        std::atomic<std::uint64_t> at[Seeds::most_jobs], ran[Seeds::most_jobs];
        std::atomic<Part>          part[Seeds::most_jobs];
    };
    if (!seeds.fit()) throw std::runtime_error("the seeds go beyond 2^64");
    void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory can be shared");
    Shared& shared  = *new (memory) Shared();
    shared.end      = seeds.first + seeds.n;
    const int  jobs = std::clamp(seeds.jobs, 1, Seeds::most_jobs);
    const auto work = [&](int job) {
        Reached reached;
        for (std::uint64_t seed = seeds.first + std::uint64_t(job); seed < shared.end; seed += std::uint64_t(jobs)) {
            for (const Part part : parts(seed)) {
                alarm(patience);
                shared.at[job]   = seed;
                shared.part[job] = part;
                const Verdict v  = body(seed, part);
                if (!v.wrong.empty()) {
                    say(v.wrong);
                    return 1;
                }
                for (const auto& [name, count] : v.reached) reached[name] += count;
            }
            shared.ran[job]++;
        }
        std::string text;
        for (const auto& [name, count] : reached) text += cat(count, " ", name, "\n");
        say(text);
        return 0;
    };
    std::vector<Notes> notes(static_cast<std::size_t>(jobs));
    std::vector<pid_t> children;
    for (int job = 0; job < jobs; job++)
        children.push_back(start(notes[std::size_t(job)], [&, job] { return work(job); }));
    Finding found;
    for (int left = jobs; left > 0; left--) {
        int         status = 0;
        const pid_t child  = wait(&status);
        const auto  job    = std::size_t(std::find(children.begin(), children.end(), child) - children.begin());
        if (job == children.size()) {
            left++;
            continue;
        }
        if (const std::string wrong = death(status, notes[job]); !wrong.empty()) {
            const std::uint64_t seed = shared.at[job];
            if (!found.seed || seed < *found.seed)
                found.seed = seed, found.part = shared.part[job], found.wrong = wrong;
            shared.end = std::min<std::uint64_t>(shared.end, seed); // the others run on to this one
            continue;
        }
        std::istringstream lines(notes[job].text());
        for (std::string line; std::getline(lines, line);)
            if (const std::size_t blank = line.find(' '); blank != std::string::npos)
                found.reached[line.substr(blank + 1)] += std::strtoull(line.c_str(), nullptr, 10);
    }
    for (int job = 0; job < jobs; job++) found.ran += shared.ran[job];
    munmap(memory, sizeof(Shared));
    return found;
}

// The message of a failure without its numbers. Two runs with equal messages fail alike.
static std::string kind_of(const std::string& wrong) {
    std::string kind;
    for (char c : wrong)
        if (std::isalpha(static_cast<unsigned char>(c)) && kind.size() < 24) kind += c;
    return kind;
}

std::vector<std::string> shrink(const Scenario& scenario, const std::function<std::string(const Scenario&)>& fails) {
    std::vector<std::string> done;
    Scenario                 best = scenario;
    int                      left = 1500; // runs
    const std::string        kind = kind_of(fails(scenario));
    const auto               try_ = [&](const std::vector<std::string>& changes) {
        Scenario next = best;
        for (const std::string& how : changes) (void)change(next, how);
        if (left-- <= 0 || kind_of(fails(next)) != kind) return false;
        best = std::move(next);
        done.insert(done.end(), changes.begin(), changes.end());
        return true;
    };
    // Requests by halves first.
    std::vector<std::string> off;
    for (std::size_t i = 0; i < best.tasks.size(); i++) off.push_back(cat(i, ".on=0"));
    for (std::size_t n = off.size() / 2; n > 1; n /= 2)
        for (std::size_t at = 0; at + n <= off.size(); at += n)
            (void)try_({off.begin() + std::ptrdiff_t(at), off.begin() + std::ptrdiff_t(at + n)});
    for (bool more = true; more && left > 0;) {
        more = false;
        for (const std::string& how : simpler(best)) more = try_({how}) || more;
    }
    // Only the last word about each number counts; which requests come is said together.
    std::map<std::string, std::string> last;
    for (const std::string& how : done) last[how.substr(0, how.find('='))] = how;
    // The numbers of a request that does not come count where another request follows its answer.
    std::vector<bool> counts(best.tasks.size());
    for (std::size_t i = 0; i < best.tasks.size(); i++)
        for (int at = best.tasks[i].on ? int(i) : -1; at >= 0 && !counts[std::size_t(at)];
             at     = best.tasks[std::size_t(at)].follows)
            counts[std::size_t(at)] = true;
    std::string only;
    for (std::size_t i = 0; i < best.tasks.size(); i++) {
        if (best.tasks[i].on) only += cat(only.empty() ? "only=" : ",", i);
        std::erase_if(last, [&](const auto& one) {
            return one.first == cat(i, ".on") || (!counts[i] && one.first.starts_with(cat(i, ".")));
        });
    }
    std::vector<std::string> changes;
    if (!only.empty()) changes.push_back(only);
    for (const auto& [name, how] : last) changes.push_back(how);
    return changes;
}

} // namespace quire::simulation
