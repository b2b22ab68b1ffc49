// Any text as a Jinja template: parsing and rendering end, within their limits.
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.marked_text;
import quire.text.templates.jinja.jinja_template;

using namespace quire;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    static const Json      variables = *json_parse(
        R"({"messages":[{"role":"user","content":"a <|im_end|> \u00e4"},{"role":"assistant","content":["x",1,-2.5,null,true]}],"tools":null})");
    const Result<JinjaTemplate> parsed = JinjaTemplate::parse(text);
    if (!parsed) return 0;
    const Result<MarkedText> out = parsed->render(variables, {});
    std::size_t              end = 0;
    if (out)
        for (const TextSpan& s : out->input) {
            check(s.begin >= end && s.begin < s.end && s.end <= out->bytes.size(),
                  "spans are in order and inside the text");
            end = s.end;
        }
    return 0;
}
