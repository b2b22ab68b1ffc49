// quire.serve.api.answer_blocks: the parts of an answer → blocks of text, reasoning and calls that begin and end, as the APIs of Anthropic and
// OpenAI's responses have them. Whole answers and streams take this one way, so that both have the same blocks. **Owns** the white
// space that may yet belong to a text.
export module quire.serve.api.answer_blocks;

import quire.core.base;
import quire.text.calls.tool_calls;

export namespace quire {

struct BlockEvent {
    enum class What : std::uint8_t {
        begin, // a block of `kind` begins: a call with its name and the first part of its arguments
        text,  // of the open block; more of a call's arguments
        end    // of the open block, also of a call
    };
    What             what = What::begin;
    AnswerPart::Kind kind = AnswerPart::Kind::content;
    std::string      text;
    ToolCall         call;
};

class AnswerBlocks {
public:
    // The events of the answer's next parts.
    std::vector<BlockEvent> push(std::vector<AnswerPart> parts);
    // No more will come. An answer without any block gets a text, which may be empty.
    std::vector<BlockEvent> finish();

private:
    void close(std::vector<BlockEvent>& out);

    std::optional<AnswerPart::Kind> open_;
    std::string                     blank_; // white space with which a text would begin
    bool                            any_ = false;
};

} // namespace quire

module :private;

namespace quire {

std::vector<BlockEvent> AnswerBlocks::push(std::vector<AnswerPart> parts) {
    using What = BlockEvent::What;
    using Kind = AnswerPart::Kind;
    std::vector<BlockEvent> out;
    for (AnswerPart& part : parts) {
        if (part.kind == Kind::call) {
            if (part.call.more) {
                out.push_back({What::text, Kind::call, std::move(part.call.arguments), {}});
                continue;
            }
            close(out);
            out.push_back({What::begin, Kind::call, "", std::move(part.call)});
            open_ = Kind::call;
            any_  = true;
            continue;
        }
        if (open_ != part.kind) {
            if (open_) close(out);
            // A text of white space alone, between calls, is no block.
            blank_ += part.text;
            if (part.kind == Kind::content && blank_.find_first_not_of(" \t\r\n") == std::string::npos) continue;
            out.push_back({What::begin, part.kind, "", {}});
            open_     = part.kind;
            any_      = true;
            part.text = std::exchange(blank_, "");
        }
        out.push_back({What::text, part.kind, std::move(part.text), {}});
    }
    return out;
}

std::vector<BlockEvent> AnswerBlocks::finish() {
    using What = BlockEvent::What;
    using Kind = AnswerPart::Kind;
    std::vector<BlockEvent> out;
    if (!any_) {
        out.push_back({What::begin, Kind::content, "", {}});
        if (!blank_.empty()) out.push_back({What::text, Kind::content, blank_, {}});
        open_ = Kind::content;
    }
    close(out);
    return out;
}

void AnswerBlocks::close(std::vector<BlockEvent>& out) {
    blank_.clear();
    if (open_) out.push_back({BlockEvent::What::end, *open_, "", {}});
    open_.reset();
}

} // namespace quire
