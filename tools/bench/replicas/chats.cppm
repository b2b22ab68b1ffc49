// quire.tools.bench.replicas.chats: ShareGPT-like chats that go on in rounds: each round's prompt is all that was said before and a new
// question, asked some time after the last answer. **Owns** which chats are open and how far each is.
export module quire.tools.bench.replicas.chats;

import quire.core.base;
import quire.tools.bench.paper.workload;

export namespace quire::replicas {

struct ChatOptions {
    int           n_open     = 100;  // at a time; one that ends is followed by another
    double        think      = 10;   // seconds from an answer to the next question, in the mean (exponential)
    int           context    = 4096; // a chat that would be longer ends
    int           vocabulary = 32000;
    double        scale      = 1; // of all lengths, for small models
    std::uint32_t seed       = 1;
};

struct Round {
    double        at     = 0; // seconds: when it is asked
    int           chat   = 0; // its number among the open chats
    std::uint64_t text   = 0; // identifies the tokens: one number for all rounds of a conversation
    int           prompt = 0, output = 0;
};

class Chats {
public:
    explicit Chats(const ChatOptions& options);

    // The first question of each open chat, which may be in the middle of its conversation.
    std::vector<Round> first();
    // The next question in the chat of a round that was answered at `now`.
    Round next(const Round& answered, double now);
    // The token at a position of a conversation, be it of a question or of an answer.
    Token token_at(std::uint64_t text, int position) const;

private:
    struct Open {
        std::size_t   row = 0, end = 0; // of the lengths: the next round, and the end of the conversation
        std::uint64_t text = 0;
        int           said = 0; // tokens before the next question
    };
    void   begin(Open& chat, bool anywhere);
    Round  ask(int chat, double at);
    double wait() { // exponential
        return -options_.think * std::log(1 - std::uniform_real_distribution<double>(0, 1)(random_));
    }
    int scaled(int n) const { return std::max(1, int(n * options_.scale)); }

    ChatOptions                                      options_;
    std::mt19937                                     random_;
    std::span<const paper::Lengths>                  rows_;
    std::vector<std::pair<std::size_t, std::size_t>> conversations_; // [first, end) of rows_
    std::vector<Open>                                open_;
    std::uint64_t                                    n_texts_ = 0;
};

} // namespace quire::replicas

module :private;

namespace quire::replicas {

Chats::Chats(const ChatOptions& options)
    : options_(options), random_(options.seed), rows_(paper::lengths_of(paper::Workload::chatbot)) {
    for (std::size_t i = 0, first = 0; i < rows_.size(); i++)
        if (i + 1 == rows_.size() || rows_[i + 1].conversation != rows_[i].conversation)
            conversations_.emplace_back(std::exchange(first, i + 1), i + 1);
}

void Chats::begin(Open& chat, bool anywhere) {
    const auto [first, end] = conversations_[random_() % conversations_.size()];
    chat.row                = anywhere ? first + random_() % (end - first) : first;
    chat.end                = end;
    chat.text               = n_texts_++;
    chat.said               = 0;
    for (std::size_t i = first; i < chat.row; i++) { // the rounds before
        const int question =
            i == first ? rows_[i].prompt : rows_[i].history - rows_[i - 1].history - rows_[i - 1].output;
        chat.said += scaled(std::max(question, 1)) + scaled(rows_[i].output);
    }
}

Round Chats::ask(int which, double at) {
    Open& chat = open_[std::size_t(which)];
    while (true) {
        if (chat.row == chat.end) begin(chat, false);
        const paper::Lengths& l = rows_[chat.row];
        // The question is the part of the next history beyond this history and its answer; the last question is the part that its prompt shows.
        const int   question = chat.row + 1 < chat.end ? rows_[chat.row + 1].history - l.history - l.output
                                                       : l.prompt - std::min(l.history, 1024);
        const Round round{at, which, chat.text, chat.said + scaled(std::max(question, 8)), scaled(l.output)};
        if (round.prompt + round.output < options_.context) {
            chat.row++;
            chat.said = round.prompt + round.output;
            return round;
        }
        if (chat.said == 0) { // a single round that is too long: another conversation
            begin(chat, false);
            continue;
        }
        begin(chat, false);
    }
}

std::vector<Round> Chats::first() {
    open_.assign(std::size_t(options_.n_open), {});
    std::vector<Round> rounds;
    for (int i = 0; i < options_.n_open; i++) {
        begin(open_[std::size_t(i)], true);
        rounds.push_back(ask(i, wait()));
    }
    return rounds;
}

Round Chats::next(const Round& answered, double now) { return ask(answered.chat, now + wait()); }

Token Chats::token_at(std::uint64_t text, int position) const {
    const int           first = std::min(300, options_.vocabulary / 2);
    const std::uint64_t x     = (text * 0x9e3779b97f4a7c15u + std::uint64_t(position)) * 0xd6e8feb86659fd93u;
    return first + Token((x >> 32) % std::uint64_t(options_.vocabulary - first));
}

} // namespace quire::replicas
