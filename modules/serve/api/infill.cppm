// quire.serve.api.infill: prompts whose answer stands between two texts → token ids, by the marks of the model's vocabulary. Owns nothing.
export module quire.serve.api.infill;

import quire.core.base;
export import quire.serve.api.error;
export import quire.serve.api.generation_request;
import quire.serve.api.prompt_encoder;
export import quire.text.tokens.fill_in_middle;
import quire.text.tokens.tokenizer;

export namespace quire {

// The ids of a prompt behind which the model writes what stands between `before` and the suffix. `room`: most ids; what does not fit is left out, first the
// other files from the first one on, then of both texts what is far from the gap; 0: nothing is left out.
std::vector<Token> infill_tokens(const Tokenizer& tokenizer, const MiddleMarks& marks, const Infill& infill,
                                 const Prompt& before, int room);

// The error of a model without the marks. `param`: the field that asks for them; "": the route does.
ApiError no_middle_marks(const std::string& param);

} // namespace quire

module :private;

namespace quire {

// As encode_inside(), for a text in which nothing is special.
std::vector<Token> literal_inside(const Tokenizer& tokenizer, std::string_view text) {
    const EncodeOptions      plain{.add_special = false, .parse_special = false};
    const std::vector<Token> anchor = tokenizer.encode("\n", plain);
    std::vector<Token>       all    = tokenizer.encode(cat("\n", text), plain);
    if (all.size() < anchor.size() || !std::equal(anchor.begin(), anchor.end(), all.begin()))
        return tokenizer.encode(text, plain);
    all.erase(all.begin(), all.begin() + std::ptrdiff_t(anchor.size()));
    return all;
}

std::vector<Token> infill_tokens(const Tokenizer& tokenizer, const MiddleMarks& marks, const Infill& infill,
                                 const Prompt& prompt, int room) {
    // Code may spell a mark: there it is text.
    const auto ids    = [&](const std::string& text) { return literal_inside(tokenizer, text); };
    const auto append = [](std::vector<Token>& to, const std::vector<Token>& more) {
        to.insert(to.end(), more.begin(), more.end());
    };
    const auto begin_file = [&](std::vector<Token>& to, const std::string& name) {
        if (marks.file < 0) return append(to, ids("\n\n--- " + name + "\n\n"));
        to.push_back(marks.file);
        append(to, ids(name + "\n"));
    };
    std::vector<Token>              before, after = ids(infill.suffix), head;
    std::vector<std::vector<Token>> files;
    for (const PromptPart& part : prompt) {
        const auto* text = std::get_if<std::string>(&part);
        append(before, text ? ids(*text) : std::get<std::vector<Token>>(part));
    }
    for (const auto& [name, text] : infill.files) {
        begin_file(files.emplace_back(), name);
        append(files.back(), ids(text));
    }
    if (tokenizer.adds_bos()) head.push_back(tokenizer.bos());
    std::vector<Token> named; // where the file with the gap begins: only other files make that necessary
    if (!files.empty()) {
        if (marks.repository >= 0) {
            head.push_back(marks.repository);
            append(head, ids("repository\n"));
        }
        if (marks.file >= 0) begin_file(named, "file");
    }

    constexpr std::size_t n_marks = 3;
    std::size_t           first   = 0; // of the other files
    if (room > 0) {
        const auto  most = std::size_t(room);
        std::size_t all  = head.size() + named.size() + before.size() + after.size() + n_marks;
        for (const std::vector<Token>& file : files) all += file.size();
        while (all > most && first < files.size()) all -= files[first++].size();
        if (all > most) {
            // Three quarters for the text before the gap, and what the other text does not need.
            const std::size_t rest = most - std::min(most, head.size() + named.size() + n_marks);
            const std::size_t tail =
                std::min(after.size(), rest - std::min(rest, std::min(before.size(), rest * 3 / 4)));
            after.resize(tail);
            const std::size_t keep = std::min(before.size(), rest - tail);
            before.erase(before.begin(), before.end() - std::ptrdiff_t(keep));
        }
    }
    std::vector<Token> out = std::move(head);
    for (std::size_t i = first; i < files.size(); i++) append(out, files[i]);
    append(out, named);
    out.push_back(marks.prefix);
    append(out, before);
    out.push_back(marks.suffix);
    append(out, after);
    out.push_back(marks.middle);
    return out;
}

ApiError no_middle_marks(const std::string& param) {
    return {param.empty() ? 501 : 400, "the model's vocabulary has no marks to fill in the middle of a text", param,
            "no_fill_in_middle"};
}

} // namespace quire
