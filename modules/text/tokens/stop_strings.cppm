// quire.text.tokens.stop_strings: the tokens of one answer → its text, up to the first stop string. Owns nothing.
export module quire.text.tokens.stop_strings;

import quire.core.base;
import quire.text.tokens.tokenizer;

export namespace quire {

struct TextOptions {
    std::vector<std::string> stop;
    bool                     include_stop = false, skip_special = true;
    int                      min_tokens = 0; // within so many tokens stop strings are ignored
};

// Turns the tokens of one answer into text. Text that may become a stop string, and incomplete characters, are held back.
class AnswerText {
public:
    AnswerText(const Tokenizer& tokenizer, const TextOptions& options);

    // Appends a token. `ends`: it is the end or stop token by which the engine ended the answer. True: the text has a stop string,
    // the answer is over.
    bool push(Token token, bool ends);
    // No more will come.
    void finish();
    // The text since the last call that no later token can change.
    std::string take();

    const std::string& stop_string() const { return stop_string_; } // that ended it; "" if none did
    bool               over() const { return over_; }
    int                n_tokens() const { return n_tokens_; }

private:
    void        append(std::string_view text);
    std::size_t held() const;

    const TextOptions* options_;
    Detokenizer        detokenizer_;
    std::string        text_;
    std::size_t        taken_ = 0, searched_ = 0;
    std::string        stop_string_;
    int                n_tokens_ = 0;
    bool               over_     = false;
};

} // namespace quire

module :private;

namespace quire {

AnswerText::AnswerText(const Tokenizer& tokenizer, const TextOptions& options)
    : options_(&options), detokenizer_(tokenizer, false, !options.skip_special) {}

bool AnswerText::push(Token token, bool ends) {
    if (over_) return false;
    n_tokens_++;
    // An end or stop token is not part of the text, unless the request asks for it.
    if (!ends || options_->include_stop) append(detokenizer_.push(token));
    return over_;
}

void AnswerText::finish() {
    if (over_) return;
    append(detokenizer_.finish());
    over_ = true;
}

void AnswerText::append(std::string_view text) {
    text_ += text;
    if (n_tokens_ < options_->min_tokens) {
        searched_ = text_.size();
        return;
    }
    std::size_t        first = std::string::npos;
    const std::string* which = nullptr;
    for (const std::string& stop : options_->stop) {
        const std::size_t from = searched_ >= stop.size() ? searched_ - stop.size() + 1 : 0;
        if (const std::size_t at = text_.find(stop, from); at < first) {
            first = at;
            which = &stop;
        }
    }
    searched_ = text_.size();
    if (!which) return;
    stop_string_ = *which;
    text_.resize(first + (options_->include_stop ? which->size() : 0));
    taken_ = std::min(taken_, text_.size());
    over_  = true;
}

// Bytes at the end that may be the beginning of a stop string.
std::size_t AnswerText::held() const {
    std::size_t longest = 0;
    for (const std::string& stop : options_->stop)
        for (std::size_t n = std::min(stop.size() - 1, text_.size()); n > longest; n--)
            if (std::string_view(text_).ends_with(std::string_view(stop).substr(0, n))) longest = n;
    return longest;
}

std::string AnswerText::take() {
    const std::size_t upto = over_ ? text_.size() : text_.size() - held();
    if (upto <= taken_) return {};
    std::string out = text_.substr(taken_, upto - taken_);
    taken_          = upto;
    return out;
}

} // namespace quire
