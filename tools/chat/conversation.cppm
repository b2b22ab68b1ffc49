// quire.tools.chat.conversation: a conversation as messages and as the tokens that the model saw. **Owns** both; prints each answer as
// it comes, and its timings.
module;

#include <cstdio>
#include <cstdlib>

export module quire.tools.chat.conversation;

import quire.constraint.compile;
import quire.constraint.reasoning_budget;
import quire.core.base;
import quire.engine.engine;
import quire.text.templates.chat_template;
import quire.text.tokens.breaker_sequences;
import quire.text.tokens.tokenizer;
import quire.tools.chat.flags;
import quire.tools.common.terminal;
import quire.tools.common.word_wrap;

export namespace quire {

class Chat {
public:
    // All of them outlive the conversation.
    Chat(Engine& engine, const ChatArguments& arguments, const ChatTemplate& chat_template, TerminalFacts facts);
    ~Chat();

    void clear();
    // Adds the user's message and answers it. False: there was no answer, and the conversation is as it was before.
    bool say(std::string text);
    // Error: a sentence, when a message that begins with `text` is too long for the context, whatever came before it.
    Result<void> check_length(std::string_view text) const;
    // Another answer to the last message.
    bool regenerate();
    // A line about the program itself: never on standard output, where only answers belong.
    void note(std::string_view text) const;

    bool failed() const; // an answer ended because the model's numbers are not finite

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace quire

module :private;

namespace quire {

struct Chat::Impl {
    Impl(Engine& engine, const ChatArguments& arguments, const ChatTemplate& chat_template, TerminalFacts facts)
        : engine_(engine), arguments_(arguments), template_(chat_template),
          color_(arguments.color == "on" ||
                 (arguments.color == "auto" && facts.out && !facts.dumb && std::getenv("NO_COLOR") == nullptr)),
          timings_(arguments.timings || (facts.in && facts.out && !arguments.no_timings)),
          timings_file_(facts.out ? stdout : stderr), progress_(facts.err && !facts.dumb), wraps_(facts.out),
          seed_(arguments.seed >= 0 ? std::uint64_t(arguments.seed) : std::random_device{}()) {
        clear();
    }

    void clear() {
        messages_.clear();
        if (!arguments_.system.empty()) messages_.push_back(Json{{"role", "system"}, {"content", arguments_.system}});
        known_        = {};
        said_trimmed_ = false;
    }

    bool say(std::string text) {
        std::vector<Json> before = messages_; // fitting_prompt() leaves out old turns
        messages_.push_back(Json{{"role", "user"}, {"content", std::move(text)}});
        if (answer()) return true;
        messages_ = std::move(before);
        return false;
    }

    // Another answer to the last message.
    bool regenerate() {
        if (messages_.empty() || messages_.back()["role"] != "assistant") {
            note("There is no answer yet.");
            return false;
        }
        std::vector<Json> before = messages_;
        messages_.pop_back();
        if (answer()) return true;
        messages_ = std::move(before);
        return false;
    }

    // A line about the program itself: never on standard output, where only answers belong.
    void note(std::string_view text) const {
        const std::string shown = progress_ ? wrapped(text, screen_columns()) : std::string(text);
        std::fprintf(stderr, "%s\n", shown.c_str());
    }

    // The last prompt and its answer as the model saw them. Keeping the ids, in place of tokenising the whole text
    // anew, makes sure that the next prompt begins with them, and that the prefix cache has its blocks.
    struct Known {
        std::string        text, answer;
        std::vector<Token> ids, answer_ids; // the answer without an end token
        bool               whole = false;   // answer_ids spell `answer`
    };

    Result<MarkedText> render() const { return render(messages_); }
    Result<MarkedText> render(const std::vector<Json>& messages) const {
        ChatSurroundings around;
        const Tokenizer& t = engine_.tokenizer();
        if (t.bos() >= 0) around.bos_token = t.piece(t.bos());
        if (t.eos() >= 0) around.eos_token = t.piece(t.eos());
        around.now       = local_seconds(arguments_.now).value_or(0);
        around.llama_cpp = true;
        ChatInput input;
        input.messages = messages;
        return template_.render(input, around);
    }

    std::vector<Token> encode_whole(const MarkedText& text) const {
        const Tokenizer&   t = engine_.tokenizer();
        std::vector<Token> ids =
            t.encode(text.bytes, {.add_special = false, .parse_special = true, .no_special = text.input});
        // A template may have written BOS itself; it must be there once.
        if (t.adds_bos() && t.bos() >= 0 && (ids.empty() || ids[0] != t.bos())) ids.insert(ids.begin(), t.bos());
        return ids;
    }

    // Tokens of a text in the middle: behind an anchor, since some vocabularies put a space before a beginning.
    std::vector<Token> encode_rest(const MarkedText& rest) const {
        const Tokenizer&  t      = engine_.tokenizer();
        const std::string anchor = "\n";
        MarkedText        anchored;
        anchored.append(anchor, false);
        anchored.append(rest);
        auto encode = [&](const MarkedText& text) {
            return t.encode(text.bytes, {.add_special = false, .parse_special = true, .no_special = text.input});
        };
        std::vector<Token> before = t.encode(anchor, {.add_special = false}), all = encode(anchored);
        if (all.size() < before.size() || !std::equal(before.begin(), before.end(), all.begin())) return encode(rest);
        all.erase(all.begin(), all.begin() + std::ptrdiff_t(before.size()));
        return all;
    }

    static std::string_view trimmed(std::string_view text) {
        constexpr std::string_view blanks = " \t\r\n";
        const std::size_t          first  = text.find_first_not_of(blanks);
        return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(blanks) - first + 1);
    }

    // Where in `text` the last answer ends, if `text` is the last prompt, that answer and more. A form may have
    // trimmed the answer: then the blanks stay as the model wrote them.
    std::optional<std::size_t> end_of_known(std::string_view text) const {
        if (!known_.whole || !text.starts_with(known_.text)) return std::nullopt;
        const std::string_view rest = text.substr(known_.text.size());
        if (rest.starts_with(known_.answer)) return known_.text.size() + known_.answer.size();
        const std::string_view core  = trimmed(known_.answer);
        const std::size_t      first = rest.find_first_not_of(" \t\r\n");
        if (first == std::string::npos || !rest.substr(first).starts_with(core)) return std::nullopt;
        return known_.text.size() + first + core.size();
    }

    std::vector<Token> encode(const MarkedText& text) const {
        if (known_.whole && text.bytes == known_.text) return known_.ids;
        const std::optional<std::size_t> end = end_of_known(text.bytes);
        if (!end) return encode_whole(text);
        std::vector<Token> ids = known_.ids, rest = encode_rest(text.slice(*end, text.bytes.size()));
        ids.insert(ids.end(), known_.answer_ids.begin(), known_.answer_ids.end());
        ids.insert(ids.end(), rest.begin(), rest.end());
        return ids;
    }

    // The most tokens of a sequence.
    int room() const {
        const EngineOptions o = engine_.options();
        return o.layout.longest(o.kv_blocks, o.block_size, o.context);
    }

    void say_full() const {
        note(cat("The context of ", room(), " tokens is full; /clear starts a new conversation."));
    }

    // Tokens of a prompt of the system message and one of the user.
    Result<std::size_t> count_alone(const Json& message) const {
        std::vector<Json> messages;
        if (!messages_.empty() && messages_.front()["role"] == "system") messages.push_back(messages_.front());
        messages.push_back(message);
        const Result<MarkedText> text = render(messages);
        if (!text) return std::unexpected(text.error());
        return encode_whole(*text).size();
    }

    // The most tokens of a prompt: one token is left for the answer.
    std::size_t most_prompt() const { return std::size_t(room() - 1); }

    Result<void> check_length(std::string_view text) const {
        const Result<std::size_t> n = count_alone(Json{{"role", "user"}, {"content", text}});
        if (!n) return std::unexpected(n.error());
        if (*n <= most_prompt()) return {};
        return fail_with(ErrorKind::limit, "it has ", *n, " tokens with the chat template, and ", most_prompt(),
                         " fit into the context");
    }

    // Error: the prompt of all messages has `n` tokens, which are too many.
    std::unexpected<Error> too_long(std::size_t n) const {
        if (auto ok = check_length(messages_.back()["content"].get<std::string>()); !ok)
            return fail_with(ErrorKind::limit, "The message is too long and is taken back: ", ok.error().message, '.');
        return fail_with(ErrorKind::limit, "The message is taken back: with it the conversation has ", n,
                         " tokens, and ", most_prompt(), " fit into the context; /clear starts a new one.");
    }

    // The prompt, if need be without the oldest turns: as few as leave free a quarter of the context, or the most tokens of an answer.
    // The system message and the last one stay. Error: the last message does not fit, or the template fails.
    Result<std::pair<MarkedText, std::vector<Token>>> fitting_prompt() {
        const int reserve = arguments_.n > 0 ? std::min(arguments_.n, room() / 4) : room() / 4;
        for (std::size_t n_dropped = 0;;) {
            Result<MarkedText> text = render();
            if (!text) return std::unexpected(text.error());
            std::vector<Token> ids     = encode(*text);
            const auto         is_user = [](const Json& m) { return m["role"] == "user"; };
            const auto         first   = std::find_if(messages_.begin(), messages_.end(), is_user);
            const auto second = first == messages_.end() ? first : std::find_if(first + 1, messages_.end(), is_user);
            const bool last   = !arguments_.trim || second == messages_.end();
            if (ids.size() > most_prompt() && (last || n_dropped == 0)) {
                // Found out at once where no turn that is left out would help.
                const Result<std::size_t> alone = last ? ids.size() : count_alone(messages_.back());
                if (!alone) return std::unexpected(alone.error());
                if (*alone > most_prompt()) return too_long(ids.size());
            }
            if (last || ids.size() + std::size_t(reserve) <= std::size_t(room())) {
                if (n_dropped > 0 && !std::exchange(said_trimmed_, true))
                    note(cat("The conversation is longer than the context of ", room(),
                             " tokens: from here on its oldest messages are left out."));
                return std::pair(std::move(*text), std::move(ids));
            }
            messages_.erase(first, second);
            n_dropped++;
        }
    }

    // Tokens before the first message of the user: the system message.
    int n_before_turns() const {
        std::array<std::vector<Token>, 2> ids;
        for (std::size_t i = 0; i < ids.size(); i++) {
            std::vector<Json> messages = messages_;
            while (!messages.empty() && messages.back()["role"] != "system") messages.pop_back();
            messages.push_back(Json{{"role", "user"}, {"content", i == 0 ? "a" : "1"}});
            const Result<MarkedText> text = render(messages);
            if (!text) return 0;
            ids[i] = encode_whole(*text);
        }
        return int(std::mismatch(ids[0].begin(), ids[0].end(), ids[1].begin(), ids[1].end()).first - ids[0].begin());
    }

    // Prompt tokens that the model has read since the request was submitted, including tokens from the cache.
    int n_read(const EngineStats& before) const {
        const EngineStats now = engine_.stats();
        return int(now.prefill_tokens + now.cached_tokens - before.prefill_tokens - before.cached_tokens);
    }

    // Prints the answer's text as it comes, on a terminal word by word; the blank with which many begin is left out.
    class Printer {
    public:
        explicit Printer(bool wraps) : wraps_(wraps) {}
        void print(std::string_view text) {
            if (!begun_ && text.starts_with(' ')) text.remove_prefix(1);
            begun_                  = begun_ || !text.empty();
            const std::string shown = printable(text);
            put(wraps_ ? wrap_.push(shown, screen_columns()) : shown);
        }
        ~Printer() {
            if (wraps_) put(wrap_.finish(screen_columns()));
            if (line_open_) std::fputs("\n", stdout);
            std::fflush(stdout);
        }

    private:
        void put(const std::string& shown) {
            if (!shown.empty()) line_open_ = shown.back() != '\n';
            std::fwrite(shown.data(), 1, shown.size(), stdout);
            std::fflush(stdout);
        }

        bool     wraps_, begun_ = false, line_open_ = true;
        WordWrap wrap_;
    };

    std::shared_ptr<const SequenceBreakers> breakers() {
        if (!breakers_)
            breakers_ = std::make_shared<const SequenceBreakers>(
                breaker_sequences(arguments_.samplers.dry_breakers, engine_.tokenizer()));
        return breakers_;
    }

    // Without end tokens of its own, a plain conversation ends where the model begins to write the user's part.
    static constexpr std::string_view plain_stop = "\nUser:";

    bool answer() {
        Result<std::pair<MarkedText, std::vector<Token>>> fitting = fitting_prompt();
        if (!fitting) {
            note(fitting.error().message);
            return false;
        }
        const MarkedText& text = fitting->first;
        Request           request;
        request.prompt        = fitting->second;
        request.context_shift = arguments_.context_shift;
        if (request.context_shift) request.n_keep = n_before_turns();
        request.max_tokens = arguments_.n > 0        ? arguments_.n
                             : request.context_shift ? room()
                                                     : std::max(1, room() - int(request.prompt.size()));
        request.ignore_end = arguments_.ignore_eos;
        request.sampling   = arguments_.samplers.params;
        if (request.sampling.dry.on()) request.sampling.dry.breakers = breakers();
        if (arguments_.reasoning_budget >= 0 && template_.source().contains("<think>")) {
            if (!marks_) marks_ = std::make_shared<const ReasoningMarks>("<think>", "</think>", engine_.tokenizer());
            request.reasoning =
                ReasoningBudget(marks_, arguments_.reasoning_budget, trimmed(text.bytes).ends_with("<think>"));
        }
        request.sampling.seed = seed_ + n_answers_++;
        if (arguments_.answers) request.constraint = ConstraintState(arguments_.answers, engine_.token_trie());
        const std::vector<Token> prompt = request.prompt;
        const EngineStats        before = engine_.stats();
        Stopwatch                watch;
        Result<RequestId>        id = engine_.submit(std::move(request));
        if (!id) {
            note(id.error().message);
            return false;
        }

        const Tokenizer&    tokenizer = engine_.tokenizer();
        Detokenizer         detokenizer(tokenizer);
        std::vector<Output> events;
        std::vector<Token>  ids;
        std::string         reply;
        std::size_t         printed  = 0;
        int                 n_tokens = 0, n_cached = 0;
        double              first = 0, last = 0;
        FinishReason        finish = FinishReason::none;
        std::string         refusal;
        bool                stopped = false; // at plain_stop
        {
            StatusLine status(progress_);
            Printer    printer(wraps_);
            auto       show = [&](bool all) { // but not a text that may become the stop text
                std::size_t upto = reply.size();
                if (template_.name() == "plain") {
                    if (std::size_t at = reply.find(plain_stop); at != std::string::npos) {
                        if (!stopped) engine_.cancel(*id);
                        stopped = true;
                        upto    = at;
                        reply.resize(at);
                    } else if (std::size_t line = reply.rfind('\n');
                               !all && line != std::string::npos &&
                               plain_stop.starts_with(std::string_view(reply).substr(line))) {
                        upto = line;
                    }
                }
                if (upto > printed) printer.print(std::string_view(reply).substr(printed, upto - printed));
                printed = std::max(printed, upto);
            };
            for (bool more = true; more && finish == FinishReason::none;) {
                if (interrupted()) engine_.cancel(*id);
                events.clear();
                more = engine_.step(events);
                for (const Output& event : events) {
                    if (event.id != *id) continue;
                    last = watch.seconds();
                    if (n_tokens == 0) first = last;
                    status.clear();
                    n_tokens += int(event.tokens.size());
                    n_cached = std::max(n_cached, event.cached_tokens);
                    for (Token token : event.tokens) {
                        if (stopped || (tokenizer.is_end(token) && !arguments_.ignore_eos)) continue;
                        ids.push_back(token);
                        reply += detokenizer.push(token);
                        show(false);
                    }
                    finish  = event.finish;
                    refusal = event.message;
                }
                const int n = n_read(before);
                if (n_tokens == 0 && finish == FinishReason::none && n > 0 &&
                    (prompt.size() >= 256 || watch.seconds() > 0.5))
                    status.show(cat("reading ", n, " of ", prompt.size(), " tokens"));
            }
            status.clear();
            (void)interrupted(); // a Ctrl-C that came with the last token was meant for this answer
            if (!stopped) reply += detokenizer.finish();
            show(true);
        }
        if (finish == FinishReason::refused || finish == FinishReason::failed || finish == FinishReason::unmet) {
            note(refusal);
            failed_ = failed_ || finish != FinishReason::refused;
            return false;
        }

        const bool answered = n_tokens > 0;
        const int  read     = answered ? int(prompt.size()) : n_read(before);
        known_              = {text.bytes, reply, prompt, std::move(ids), !stopped};
        messages_.push_back(Json{{"role", "assistant"}, {"content", std::move(reply)}});
        if (timings_) show_timings(read, n_cached, n_tokens, answered ? first : last, last);
        if (!answered && finish == FinishReason::cancelled)
            note(cat("Stopped when ", read, " of ", prompt.size(), " tokens were read. /regen ",
                     arguments_.engine.prefix_cache ? "goes on from there" : "begins again", "."));
        if (finish == FinishReason::length && (arguments_.n < 0 || n_tokens < arguments_.n)) {
            if (arguments_.context_shift && n_tokens >= room())
                note(cat("The answer ends after ", n_tokens, " tokens, as many as the context has; -n N allows more."));
            else say_full();
        }
        return true;
    }

    void show_timings(int n_prompt, int n_cached, int n_tokens, double first, double last) const {
        auto rate = [](int n, double seconds) {
            char text[32];
            std::snprintf(text, sizeof text, "%.1f t/s", seconds > 0 ? n / seconds : 0.0);
            return std::string(text);
        };
        // The first token comes with the prompt's last step.
        std::string line = cat("[ prompt ", n_prompt - n_cached, " tokens, ", n_cached, " from cache, ",
                               rate(n_prompt - n_cached, first), " | answer ", n_tokens, " tokens, ",
                               rate(n_tokens - 1, last - first), " ]");
        if (timings_file_ == stdout || progress_) line = wrapped(line, screen_columns());
        std::fprintf(timings_file_, "%s%s%s\n", color_ ? "\x1b[2m" : "", line.c_str(), color_ ? "\x1b[0m" : "");
        std::fflush(timings_file_);
    }

    Engine&                                 engine_;
    const ChatArguments&                    arguments_;
    const ChatTemplate&                     template_;
    bool                                    color_, timings_;
    std::FILE*                              timings_file_;
    bool                                    progress_; // of long prompts is shown
    bool                                    wraps_;    // answers are wrapped at words
    std::uint64_t                           seed_, n_answers_ = 0;
    std::vector<Json>                       messages_;
    Known                                   known_;
    bool                                    failed_ = false, said_trimmed_ = false;
    std::shared_ptr<const SequenceBreakers> breakers_; // once they are needed; likewise the marks
    std::shared_ptr<const ReasoningMarks>   marks_;
};

Chat::Chat(Engine& engine, const ChatArguments& arguments, const ChatTemplate& chat_template, TerminalFacts facts)
    : impl_(std::make_unique<Impl>(engine, arguments, chat_template, facts)) {}
Chat::~Chat() = default;

void         Chat::clear() { impl_->clear(); }
bool         Chat::say(std::string text) { return impl_->say(std::move(text)); }
Result<void> Chat::check_length(std::string_view text) const { return impl_->check_length(text); }
bool         Chat::regenerate() { return impl_->regenerate(); }
void         Chat::note(std::string_view text) const { impl_->note(text); }
bool         Chat::failed() const { return impl_->failed_; }

} // namespace quire
