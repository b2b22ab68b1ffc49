// quire.constraint.formats.answer_grammar: the rules of a chat's answer: reasoning, then text, or calls of tools in the form in which the
// model writes them. Owns nothing. The arguments of a call follow the tool's schema from the mark on with which a call begins; before it any
// text goes.
export module quire.constraint.formats.answer_grammar;

import quire.constraint.formats.answer_texts;
import quire.constraint.formats.call_arguments;
import quire.constraint.grammar.grammar;
import quire.core.base;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;

export namespace quire {

struct AnswerRules {
    CallForm      form;
    Json          tools        = Json::array(); // as OpenAI's field has them; none: the answer calls none
    bool          required     = false;         // the answer is a call
    bool          parallel     = true;          // more than one call
    bool          may_reason   = false;         // it may begin with the first mark of reasoning
    bool          in_reasoning = false;         // the prompt ends with that
    ReasoningForm reasoning{std::string(think_begin), std::string(think_end)};
    // `controls`: the marks, of answer_marks() and of calls and reasoning, that are control tokens of the vocabulary; `ends`: the control
    // tokens that end an answer.
    std::vector<std::string> controls, ends;
};

// The marks of calls and reasoning.
std::span<const std::string_view> answer_marks();

// `text`: an answer that is no call; none: any text. Error: a schema that is not supported, if the call is required or the tool is
// `strict`; in other cases arguments without a supported schema may be any object.
Result<GrammarSymbol> add_answer(Grammar& grammar, const AnswerRules& rules, std::optional<GrammarSymbol> text);

} // namespace quire

module :private;

namespace quire {

std::span<const std::string_view> answer_marks() {
    static const std::vector<std::string_view> all = split(
        "<think> </think> <tool_call> </tool_call> [TOOL_CALLS] [CALL_ID] [ARGS] <|python_tag|> <arg_key> </arg_key> "
        "<arg_value> </arg_value> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> "
        "<｜tool▁sep｜> <|channel|> <|message|> <|constrain|> <|start|> <|end|> <|call|> <|return|>");
    return all;
}

class AnswerBuilder : AnswerTexts {
public:
    AnswerBuilder(Grammar& g, const AnswerRules& rules) : AnswerTexts(g, rules.controls, rules.ends), rules_(rules) {}

    Result<GrammarSymbol> answer(std::optional<GrammarSymbol> text) {
        GrammarSymbol body;
        if (rules_.tools.empty()) {
            body = behind_final(text ? *text : any_text());
        } else {
            read_tools();
            const Result<void> made = calls();
            if (!made) return std::unexpected(made.error());
            if (rules_.required) body = only_calls();
            else if (text) body = g_.add_rules({{behind_final(*text)}, {only_calls()}});
            else body = text_and_calls();
        }
        return behind_reasoning(body, !rules_.required && !text);
    }

private:
    using Tool  = CallableTool;
    using Rule  = std::vector<GrammarSymbol>;
    using Rules = std::vector<Rule>;

    // A mark, and the rest of the text that begins with it.
    struct Opening {
        std::string   mark;
        GrammarSymbol rest;
    };

    // -- forms

    void read_tools() {
        for (const Json& t : rules_.tools) {
            const Json& function = t["function"];
            const auto  strict   = function.find("strict");
            Tool&       tool     = tools_.emplace_back();
            tool.name            = function["name"].get<std::string>();
            tool.function        = &function;
            tool.exact           = rules_.required || (strict != function.end() && *strict == true);
        }
    }
    // Tagged parameters whose values all stand in one way: `open` KEY `middle` VALUE `close`.
    Result<GrammarSymbol> uniform_parameters(const Tool& tool, std::string_view open, std::string_view middle,
                                             std::string_view close) {
        CallMarks m;
        m.parameter_open = open;
        m.text = m.other = {std::string(middle), std::string(close)};
        return tagged_parameters(*this, tool, m);
    }

    // {"name": "NAME", "arguments": {…}}
    GrammarSymbol call_object(const Tool& tool, std::string_view key) {
        return g_.add_rules(
            {{symbol(join({object_head(tool, "[ \\t\\r\\n]{0,8}"), pattern(cat(", ?\"", key, "\": ?"))})),
              tool.arguments, symbol(pattern("[ \\t\\r\\n]{0,8}\\}"))}});
    }
    RegexId object_head(const Tool& tool, std::string_view space) {
        return join(
            {pattern(cat("\\{", space, "\"name\"", space, ":", space)), pool_.literal(cat('"', tool.name, '"'))});
    }
    // One or more, with a separator between them.
    GrammarSymbol list_of(GrammarSymbol one, RegexId separator) {
        if (!rules_.parallel) return one;
        const GrammarSymbol list       = g_.add_empty();
        g_.symbols[list.index()].rules = {{one}, {list, symbol(separator), one}};
        return list;
    }

    // Calls as CallMarks says.
    Result<void> marked_calls() {
        const CallMarks&  m     = *rules_.form.marks;
        const std::string begin = cat(m.section_open, m.call_open), mark = m.trigger;
        const std::size_t at = begin.find_first_not_of(" \t\r\n");
        const std::string rest =
            at == std::string::npos ? std::string() : begin.substr(at + mark.size()); // behind the mark
        Rules each;
        for (const Tool& t : tools_) {
            GrammarSymbol arguments = t.arguments;
            if (m.arguments != CallMarks::Arguments::json) {
                const Result<GrammarSymbol> list = m.arguments == CallMarks::Arguments::python
                                                       ? python_parameters(*this, t)
                                                       : tagged_parameters(*this, t, m);
                if (!list) return std::unexpected(list.error());
                arguments = *list;
            }
            each.push_back(
                {symbol(join({pool_.literal(t.name), loose(m.name_close)})), arguments, symbol(loose(m.call_close))});
            if (mark.empty()) heads_.push_back(join({loose(rest), pool_.literal(t.name), loose(m.name_close)}));
        }
        const GrammarSymbol call    = g_.add_rules(std::move(each));
        const bool          section = mark.empty() || !m.section_open.empty() || !m.section_close.empty() ||
                             m.separator.find_first_not_of(" \t\r\n") != std::string::npos;
        const GrammarSymbol list  = section && m.several ? list_of(call, loose(cat(m.separator, m.call_open))) : call;
        const GrammarSymbol whole = g_.add_rules({{symbol(loose(rest)), list, symbol(loose(m.section_close))}});
        if (mark.empty()) first_ = whole;
        else openings_.push_back({mark, whole});
        return {};
    }

    Result<void> calls() {
        switch (rules_.form.kind) {
            case ToolForm::hermes:
            case ToolForm::llama3:
            case ToolForm::json:
            case ToolForm::mistral:
            case ToolForm::deepseek:
            case ToolForm::functionary:
            case ToolForm::harmony:
            case ToolForm::marked:
                if (rules_.form.marks && rules_.form.marks->arguments != CallMarks::Arguments::json) break;
                for (Tool& tool : tools_) {
                    const Result<GrammarSymbol> made = json_arguments(*this, tool);
                    if (!made) return std::unexpected(made.error());
                    tool.arguments = *made;
                }
                break;
            default: break;
        }
        const auto each = [&](const auto& make) {
            Rules all;
            for (const Tool& tool : tools_) all.push_back(make(tool));
            return g_.add_rules(std::move(all));
        };
        const auto lit = [&](std::string_view text) { return symbol(literal(text)); };
        switch (rules_.form.kind) {
            case ToolForm::hermes:
                openings_.push_back({"<tool_call>", each([&](const Tool& t) {
                                         return Rule{symbol(white()), call_object(t, "arguments"),
                                                     symbol(join({white(), literal("</tool_call>")}))};
                                     })});
                return {};
            case ToolForm::llama3:
            case ToolForm::json: {
                const std::string_view key = rules_.form.kind == ToolForm::llama3 ? "parameters" : "arguments";
                first_ = list_of(each([&](const Tool& t) { return Rule{call_object(t, key)}; }), pattern("; ?"));
                for (const Tool& t : tools_) heads_.push_back(object_head(t, "[ \\t\\r\\n]*"));
                tag_ = "<|python_tag|>";
                return {};
            }
            case ToolForm::mistral: {
                const GrammarSymbol object = each([&](const Tool& t) {
                    const RegexId id = join({pattern(", ?\"id\": ?\"[a-zA-Z0-9]{9}\"")});
                    return Rule{symbol(join({object_head(t, " ?"), pattern(", ?\"arguments\": ?")})), t.arguments,
                                symbol(join({pool_.repeat(id, 0, 1), pool_.literal("}")}))};
                });
                const GrammarSymbol named  = each([&](const Tool& t) {
                    return Rule{symbol(join({pool_.literal(t.name), pool_.repeat(literal("[ARGS]"), 0, 1)})),
                                t.arguments};
                });
                openings_.push_back(
                    {"[TOOL_CALLS]",
                     g_.add_rules({{symbol(pattern(" ?\\[")), list_of(object, pattern(", ?")), lit("]")}, {named}})});
                return {};
            }
            case ToolForm::deepseek: {
                const GrammarSymbol one = each([&](const Tool& t) {
                    const RegexId name = pool_.literal(t.name);
                    const RegexId old  = join({literal("function<｜tool▁sep｜>"), name, pool_.literal("\n```json\n")});
                    return Rule{g_.add_rules(
                        {{symbol(join({literal("<｜tool▁call▁begin｜>"), old})), t.arguments,
                          lit("\n```<｜tool▁call▁end｜>")},
                         {symbol(join({literal("<｜tool▁call▁begin｜>"), name, literal("<｜tool▁sep｜>")})),
                          t.arguments, lit("<｜tool▁call▁end｜>")}})};
                });
                openings_.push_back({"<｜tool▁calls▁begin｜>",
                                     g_.add_rules({{list_of(one, pattern("\\n?")), lit("<｜tool▁calls▁end｜>")}})});
                return {};
            }
            case ToolForm::functionary:
                openings_.push_back({"<function=", each([&](const Tool& t) {
                                         return Rule{symbol(pool_.literal(cat(t.name, '>'))), t.arguments,
                                                     lit("</function>")};
                                     })});
                return {};
            case ToolForm::qwen3_coder: {
                Rules bare, wrapped;
                for (const Tool& t : tools_) {
                    const Result<GrammarSymbol> all = uniform_parameters(t, "<parameter=", ">\n", "\n</parameter>");
                    if (!all) return std::unexpected(all.error());
                    const RegexId end = join({white(), literal("</function>")});
                    bare.push_back({symbol(pool_.literal(cat(t.name, '>'))), *all, symbol(end)});
                    wrapped.push_back({symbol(join({white(), pool_.literal(cat("<function=", t.name, '>'))})), *all,
                                       symbol(join({end, white(), literal("</tool_call>")}))});
                }
                openings_.push_back({"<tool_call>", g_.add_rules(std::move(wrapped))});
                openings_.push_back({"<function=", g_.add_rules(std::move(bare))});
                return {};
            }
            case ToolForm::glm: {
                Rules all;
                for (const Tool& t : tools_) {
                    const Result<GrammarSymbol> list =
                        uniform_parameters(t, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>");
                    if (!list) return std::unexpected(list.error());
                    all.push_back({symbol(join({pattern("\\n?"), pool_.literal(t.name), pattern("\\n?")})), *list,
                                   symbol(join({white(), literal("</tool_call>")}))});
                }
                openings_.push_back({"<tool_call>", g_.add_rules(std::move(all))});
                return {};
            }
            case ToolForm::pythonic: {
                Rules all;
                for (const Tool& t : tools_) {
                    const Result<GrammarSymbol> list = python_parameters(*this, t);
                    if (!list) return std::unexpected(list.error());
                    all.push_back({symbol(pool_.literal(cat(t.name, '('))), *list, symbol(pool_.literal(")"))});
                    heads_.push_back(join({pattern("\\[[ \\t\\r\\n]*"), pool_.literal(cat(t.name, '('))}));
                }
                first_ =
                    g_.add_rules({{symbol(pool_.literal("[")), list_of(g_.add_rules(std::move(all)), pattern(", ?")),
                                   symbol(pool_.literal("]"))}});
                return {};
            }
            case ToolForm::harmony: {
                const RegexId format =
                    join({pool_.repeat(any_of({" <|constrain|>json", "<|constrain|>json", " json"}), 0, 1),
                          literal("<|message|>")});
                const RegexId channel = pool_.repeat(literal("<|channel|>commentary"), 0, 1);
                const auto    rest    = [&](RegexId head) {
                    return each([&](const Tool& t) {
                        return Rule{symbol(join({pool_.literal(t.name), head})), t.arguments, lit("<|call|>")};
                    });
                };
                openings_.push_back({"<|channel|>commentary to=functions.", rest(format)});
                openings_.push_back({"<|start|>assistant to=functions.", rest(join({channel, format}))});
                return {};
            }
            case ToolForm::marked: return marked_calls();
            case ToolForm::none:
            case ToolForm::other: break;
        }
        return fail("the form of calls of tools is not known");
    }
    // -- the answer

    // One call or more, and nothing else.
    GrammarSymbol only_calls() {
        Rules one;
        for (const Opening& o : openings_) {
            if (o.mark.starts_with("<|start|>")) continue; // of a second message
            one.push_back({symbol(literal(o.mark)), o.rest});
        }
        const bool lists = one.empty(); // `first_` is a list of calls itself
        if (first_) {
            one.push_back({*first_});
            if (!tag_.empty()) one.push_back({symbol(literal(tag_)), *first_});
        }
        const GrammarSymbol call = g_.add_rules(std::move(one));
        if (lists || !rules_.parallel || rules_.form == ToolForm::harmony) return call;
        const GrammarSymbol all       = g_.add_empty();
        g_.symbols[all.index()].rules = {{call}, {all, symbol(pattern("\\n?")), call}};
        return all;
    }
    // Any text, and calls where their marks stand.
    GrammarSymbol text_and_calls() {
        std::vector<RegexId> marks, refused;
        for (const Opening& o : openings_) marks.push_back(literal(o.mark));
        // A text that begins like a call has to be a call.
        RegexId no_head = any();
        if (!heads_.empty()) {
            const RegexId head = pool_.any_of(heads_);
            refused.push_back(join({pattern("[ \\t\\r\\n]*"), head, any()}));
            if (!tag_.empty()) refused.push_back(join({any(), literal(tag_), pattern("[ \\t\\r\\n]*"), head, any()}));
            no_head = pool_.negate(pool_.any_of(refused));
        }
        const GrammarSymbol text = g_.add_empty();
        Rules               rules{{symbol(pool_.all_of({without(marks), no_head}))}};
        for (std::size_t i = 0; i < openings_.size(); i++) {
            Rule call{symbol(pool_.all_of({up_to(marks[i], marks), no_head})), openings_[i].rest};
            call.push_back(rules_.parallel && rules_.form != ToolForm::harmony ? text : symbol(white()));
            rules.push_back(std::move(call));
        }
        if (first_) {
            rules.push_back({symbol(white()), *first_, symbol(white())});
            if (!tag_.empty()) rules.push_back({symbol(up_to(tag_)), *first_, symbol(white())});
        }
        g_.symbols[text.index()].rules = std::move(rules);
        return text;
    }
    // Harmony says which channel a text is for.
    GrammarSymbol behind_final(GrammarSymbol text) {
        if (rules_.form != ToolForm::harmony) return text;
        return g_.add_rules({{symbol(literal("<|channel|>final<|message|>")), text}, {text}});
    }
    // `open`: the answer may end in its reasoning.
    GrammarSymbol behind_reasoning(GrammarSymbol body, bool open) {
        if (rules_.form == ToolForm::harmony) {
            const GrammarSymbol before = g_.add_empty(); // messages of analysis
            const RegexId       marks =
                any_of({"<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"});
            const GrammarSymbol end = symbol(join({up_to(literal("<|end|>"), {marks}), literal("<|start|>assistant")}));
            g_.symbols[before.index()].rules = {{}, {before, symbol(literal("<|channel|>analysis<|message|>")), end}};
            return g_.add_rules({{before, body}});
        }
        if (!rules_.may_reason && !rules_.in_reasoning) return body;
        const RegexId begin = rules_.in_reasoning ? RegexPool::blank : join({white(), literal(rules_.reasoning.begin)});
        Rules         rules{{symbol(join({begin, up_to(rules_.reasoning.end), white()})), body}};
        if (open) rules.push_back({symbol(join({begin, without({literal(rules_.reasoning.end)})}))});
        if (!rules_.in_reasoning) rules.push_back({body});
        return g_.add_rules(std::move(rules));
    }

    const AnswerRules&   rules_;
    std::vector<Tool>    tools_;
    std::vector<Opening> openings_;
    // Calls that are recognised only at the beginning of the answer; their beginnings; and a mark that may stand before them.
    std::optional<GrammarSymbol> first_;
    std::vector<RegexId>         heads_;
    std::string                  tag_;
};

Result<GrammarSymbol> add_answer(Grammar& grammar, const AnswerRules& rules, std::optional<GrammarSymbol> text) {
    return AnswerBuilder(grammar, rules).answer(text);
}

} // namespace quire
