// quire.text.templates.jinja.parser: tokens to a tree, by Jinja's grammar. Owns only the tree that it returns.
export module quire.text.templates.jinja.parser;

import quire.core.base;
import quire.core.unicode;
import quire.text.templates.jinja.ast;
export import quire.text.templates.jinja.expression_parser;
import quire.text.templates.jinja.lexer;

export namespace quire::jinja {

// Error: one sentence with line and column.
Result<Program> parse(std::string_view source, const Vocabulary& vocabulary, const ParseLimits& limits = {});

} // namespace quire::jinja

module :private;

namespace quire::jinja {

class Parser : ExpressionParser {
public:
    using ExpressionParser::ExpressionParser;

    Body run() {
        Body body = statements({});
        if (at().kind != TokenKind::end) fail("unexpected end of a block");
        return body;
    }

private:
    // -- statements

    bool at_block(std::initializer_list<std::string_view> names) const {
        return at().kind == TokenKind::block_begin && at(1).kind == TokenKind::name &&
               std::ranges::find(names, std::string_view(at(1).text)) != names.end();
    }

    // Up to a statement with one of these names, which stays; or the end of the template.
    Body statements(std::initializer_list<std::string_view> until) {
        const Level level(*this);
        Body        out;
        for (;;) {
            const Lexeme& t = at();
            if (t.kind == TokenKind::end) {
                if (until.size() > 0) fail(cat("the template ends before ", *(until.end() - 1)));
                return out;
            }
            if (t.kind == TokenKind::data) {
                NodePtr n = make(NodeKind::data);
                n->value  = Value(std::string_view(t.text));
                next_++;
                out.push_back(std::move(n));
            } else if (t.kind == TokenKind::variable_begin) {
                NodePtr n = make(NodeKind::output);
                next_++;
                n->offset = std::uint32_t(at().offset);
                add(n, tuple_expression());
                if (at().kind != TokenKind::variable_end) unexpected("the end of the expression");
                next_++;
                out.push_back(std::move(n));
            } else {
                if (at_block(until)) return out;
                next_++;
                if (NodePtr n = statement()) out.push_back(std::move(n));
            }
        }
    }
    // {% name %}, which statements() stopped at.
    void end_block(std::string_view name) {
        next_++;
        if (!skip_name(name)) unexpected(name);
        expect_block_end();
    }

    NodePtr statement() {
        const std::size_t offset = at().offset;
        const std::string name   = expect_name();
        if (name == "if") return if_statement(offset);
        if (name == "for") return for_statement(offset);
        if (name == "set") return set_statement(offset);
        if (name == "macro") return macro_statement(offset);
        if (name == "call") return call_statement(offset);
        if (name == "filter") {
            NodePtr n = make(NodeKind::filter_block, offset);
            add(n, filters(nullptr, true));
            expect_block_end();
            add_body(n, statements({"endfilter"}));
            end_block("endfilter");
            return n;
        }
        if (name == "with") {
            NodePtr n = make(NodeKind::scope, offset);
            while (at().kind != TokenKind::block_end) {
                if (!n->kids.empty()) expect_op(",");
                add(n, target(false));
                expect_op("=");
                add(n, expression());
            }
            expect_block_end();
            add_body(n, statements({"endwith"}));
            end_block("endwith");
            return n;
        }
        if (name == "generation") {
            NodePtr n = make(NodeKind::group, offset);
            expect_block_end();
            add_body(n, statements({"endgeneration"}));
            end_block("endgeneration");
            return n;
        }
        if (name == "print") {
            NodePtr n = make(NodeKind::output, offset);
            add(n, tuple_expression());
            expect_block_end();
            return n;
        }
        if (name == "break" || name == "continue") {
            if (loops_ == 0) throw SyntaxFault{cat("'", name, "' outside of a loop"), offset};
            expect_block_end();
            return make(name == "break" ? NodeKind::loop_break : NodeKind::loop_continue, offset);
        }
        const bool other = name == "block" || name == "extends" || name == "include" || name == "import" ||
                           name == "from" || name == "autoescape" || name == "do";
        throw SyntaxFault{cat(other ? "a chat template cannot have the statement " : "unknown statement ", quote(name)),
                          offset};
    }

    NodePtr if_statement(std::size_t offset) {
        NodePtr n = make(NodeKind::branch, offset);
        conditions_++;
        for (;;) {
            add(n, tuple_expression(false));
            expect_block_end();
            add_body(n, statements({"elif", "else", "endif"}));
            next_++;
            const std::string name = expect_name();
            if (name == "elif") continue;
            expect_block_end();
            if (name == "else") {
                add_body(n, statements({"endif"}));
                end_block("endif");
            }
            conditions_--;
            return n;
        }
    }

    NodePtr for_statement(std::size_t offset) {
        NodePtr n = make(NodeKind::loop, offset);
        add(n, target(true));
        if (!skip_name("in")) unexpected("'in'");
        add(n, tuple_expression(false));
        add(n, skip_name("if") ? expression() : nullptr);
        n->recursive = skip_name("recursive");
        expect_block_end();
        loops_++;
        Body body = statements({"else", "endfor"});
        loops_--;
        add_body(n, std::move(body));
        if (is_name("else", 1)) {
            end_block("else");
            add_body(n, statements({"endfor"}));
        }
        end_block("endfor");
        return n;
    }

    NodePtr set_statement(std::size_t offset) {
        NodePtr to = target(false, true);
        if (skip_op("=")) {
            NodePtr n = make(NodeKind::assign, offset);
            add(n, std::move(to));
            add(n, tuple_expression());
            expect_block_end();
            return n;
        }
        NodePtr n = make(NodeKind::capture, offset);
        add(n, std::move(to));
        add(n, is_op("|") ? filters(nullptr, false) : nullptr);
        expect_block_end();
        add_body(n, statements({"endset"}));
        end_block("endset");
        return n;
    }

    // A name, a tuple of names, or (`attribute`) name.attribute.
    NodePtr target(bool in_loop, bool attribute = false) {
        if (attribute && at().kind == TokenKind::name && is_op(".", 1)) {
            NodePtr object = make(NodeKind::name);
            object->id     = program_.id(expect_name());
            NodePtr n      = make(NodeKind::attribute);
            next_++;
            n->text = expect_name();
            add(n, std::move(object));
            return n;
        }
        const Level level(*this);
        NodePtr     first = target_item();
        if (!is_op(",")) return first;
        NodePtr n = make(NodeKind::tuple);
        add(n, std::move(first));
        while (skip_op(",")) {
            if (is_op("=") || is_op(")") || at().kind == TokenKind::block_end || (in_loop && is_name("in"))) break;
            add(n, target_item());
        }
        return n;
    }
    NodePtr target_item() {
        if (skip_op("(")) {
            NodePtr n = target(false);
            expect_op(")");
            return n;
        }
        NodePtr           n    = make(NodeKind::name);
        const std::string name = expect_name();
        if (constant_named(name)) fail(cat("cannot assign to '", name, "'"));
        n->id = program_.id(name);
        return n;
    }

    // (a, b=1): names into `parameters`, defaults into `named`.
    void signature(Node& n) {
        expect_op("(");
        while (!is_op(")")) {
            if (!n.parameters.empty()) expect_op(",");
            if (is_op(")")) break;
            const std::string name = expect_name();
            n.parameters.push_back(program_.id(name));
            if (skip_op("=")) {
                NodePtr value = expression();
                deepen(n, *value);
                n.named.emplace_back(name, std::move(value));
            } else if (!n.named.empty()) {
                fail("a parameter without a default follows one with a default");
            }
        }
        expect_op(")");
    }

    // The names in a macro's body decide which arguments the macro accepts.
    void macro_body(const NodePtr& n, std::initializer_list<std::string_view> until, std::string_view end) {
        const Uses outer      = std::exchange(uses_, Uses{});
        const int  loops      = std::exchange(loops_, 0);
        const int  conditions = conditions_;
        add_body(n, statements(until));
        end_block(end);
        n->uses_caller = uses_.caller, n->uses_varargs = uses_.varargs, n->uses_kwargs = uses_.kwargs;
        uses_       = {outer.caller || uses_.caller, outer.varargs || uses_.varargs, outer.kwargs || uses_.kwargs};
        loops_      = loops;
        conditions_ = conditions;
    }

    NodePtr macro_statement(std::size_t offset) {
        NodePtr n = make(NodeKind::macro, offset);
        n->text   = expect_name();
        n->id     = program_.id(n->text);
        signature(*n);
        expect_block_end();
        macro_body(n, {"endmacro"}, "endmacro");
        return n;
    }

    NodePtr call_statement(std::size_t offset) {
        NodePtr n = make(NodeKind::call_block, offset);
        if (is_op("(")) signature(*n);
        NodePtr call = expression();
        if (call->kind != NodeKind::call) throw SyntaxFault{"expected a call", offset};
        add(n, std::move(call));
        expect_block_end();
        n->text = "caller";
        macro_body(n, {"endcall"}, "endcall");
        return n;
    }
};

Result<Program> parse(std::string_view source, const Vocabulary& vocabulary, const ParseLimits& limits) {
    if (source.size() > limits.bytes)
        return fail("the template has ", source.size(), " bytes; ", limits.bytes, " are allowed");
    if (!utf8_valid(source)) return fail("the template is not UTF-8");
    Program program;
    program.source = normalised(source);
    try {
        program.body = Parser(program, vocabulary, limits).run();
    } catch (const SyntaxFault& f) {
        return fail(place(program.source, f.offset), ": ", f.message);
    } catch (const Fault& f) {
        return fail(f.message);
    }
    return program;
}

} // namespace quire::jinja
