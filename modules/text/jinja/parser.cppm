// quire.text.jinja.parser: tokens to a tree, by Jinja's grammar. Owns nothing but what it returns.
export module quire.text.jinja.parser;

import quire.core.base;
import quire.core.std;
import quire.core.unicode;
import quire.text.jinja.ast;
import quire.text.jinja.lexer;
import quire.text.jinja.value;

export namespace quire::jinja {

struct ParseLimits {
    std::size_t bytes   = std::size_t(1) << 20; // of the source
    int         nesting = 200;                  // of nodes in one another
};

// What the program may name; asked while parsing, as Jinja does.
struct Vocabulary {
    bool (*filter)(std::string_view name);
    bool (*test)(std::string_view name);
};

// Error: one sentence with line and column.
Result<Program> parse(std::string_view source, const Vocabulary& vocabulary, const ParseLimits& limits = {});

} // namespace quire::jinja

module :private;

namespace quire::jinja {

class Parser {
public:
    Parser(Program& program, const Vocabulary& vocabulary, const ParseLimits& limits)
        : program_(program), vocabulary_(vocabulary), limits_(limits), tokens_(lex(program.source)) {}

    Body run() {
        Body body = statements({});
        if (at().kind != TokenKind::end) fail("unexpected end of a block");
        return body;
    }

private:
    // One more level of the parser's own recursion.
    struct Level {
        explicit Level(Parser& p) : parser(p) {
            if (++p.level_ > p.limits_.nesting) p.fail(cat("the template is nested deeper than ", p.limits_.nesting));
        }
        ~Level() { parser.level_--; }
        Parser& parser;
    };

    const Lexeme&     at(std::size_t ahead = 0) const { return tokens_[std::min(next_ + ahead, tokens_.size() - 1)]; }
    [[noreturn]] void fail(std::string message) const { throw SyntaxFault{std::move(message), at().offset}; }
    [[noreturn]] void unexpected(std::string_view wanted) const {
        const Lexeme& t = at();
        fail(cat("expected ", wanted, ", got ",
                 t.kind == TokenKind::end                                              ? "the end of the template"
                 : t.kind == TokenKind::block_end || t.kind == TokenKind::variable_end ? "the end of the tag"
                                                                                       : quote(t.text)));
    }
    bool is_op(std::string_view op, std::size_t ahead = 0) const {
        return at(ahead).kind == TokenKind::op && at(ahead).text == op;
    }
    bool is_name(std::string_view name, std::size_t ahead = 0) const {
        return at(ahead).kind == TokenKind::name && at(ahead).text == name;
    }
    bool skip_op(std::string_view op) { return is_op(op) && ++next_; }
    bool skip_name(std::string_view name) { return is_name(name) && ++next_; }
    void expect_op(std::string_view op) {
        if (!skip_op(op)) unexpected(cat("'", op, "'"));
    }
    std::string expect_name() {
        if (at().kind != TokenKind::name) unexpected("a name");
        return tokens_[next_++].text;
    }
    void expect_block_end() {
        if (at().kind != TokenKind::block_end) unexpected("the end of the statement");
        next_++;
    }

    NodePtr make(NodeKind kind, std::size_t offset) const {
        auto n    = std::make_unique<Node>();
        n->kind   = kind;
        n->offset = std::uint32_t(offset);
        return n;
    }
    NodePtr make(NodeKind kind) const { return make(kind, at().offset); }
    void    deepen(Node& parent, const Node& kid) const {
        parent.depth = std::max(parent.depth, kid.depth + 1);
        if (parent.depth > limits_.nesting) fail(cat("the template is nested deeper than ", limits_.nesting));
    }
    void add(const NodePtr& parent, NodePtr kid) const {
        if (kid) deepen(*parent, *kid);
        parent->kids.push_back(std::move(kid));
    }
    void add_body(const NodePtr& parent, Body body) const {
        for (const NodePtr& n : body) deepen(*parent, *n);
        parent->bodies.push_back(std::move(body));
    }
    NodePtr binary(NodeKind kind, std::size_t offset, NodePtr left, NodePtr right) const {
        NodePtr n = make(kind, offset);
        add(n, std::move(left));
        add(n, std::move(right));
        return n;
    }

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

    // What the body of a macro names decides what it accepts.
    struct Uses {
        bool caller = false, varargs = false, kwargs = false;
    };
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

    // -- expressions

    NodePtr tuple_expression(bool conditional = true, bool empty_allowed = false) {
        auto    one   = [&] { return conditional ? expression() : or_expression(); };
        NodePtr first = nullptr;
        NodePtr n     = make(NodeKind::tuple);
        bool    comma = false;
        while (!tuple_ends()) {
            if (!n->kids.empty() || first) {
                if (!is_op(",")) break;
                next_++;
                comma = true;
                if (tuple_ends()) break;
            }
            if (first) add(n, std::move(first));
            first = one();
        }
        if (!comma) {
            if (first) return first;
            if (!empty_allowed) unexpected("an expression");
            return n;
        }
        if (first) add(n, std::move(first));
        return n;
    }
    bool tuple_ends() const {
        return at().kind == TokenKind::variable_end || at().kind == TokenKind::block_end ||
               at().kind == TokenKind::end || is_op(")");
    }

    NodePtr expression() {
        const Level level(*this);
        NodePtr     yes = or_expression();
        while (is_name("if")) {
            NodePtr n = make(NodeKind::conditional);
            next_++;
            conditions_++;
            add(n, or_expression());
            add(n, std::move(yes));
            add(n, skip_name("else") ? expression() : nullptr);
            conditions_--;
            yes = std::move(n);
        }
        return yes;
    }
    NodePtr or_expression() {
        NodePtr left = and_expression();
        while (is_name("or")) {
            const std::size_t offset = tokens_[next_++].offset;
            left                     = binary(NodeKind::logical_or, offset, std::move(left), and_expression());
        }
        return left;
    }
    NodePtr and_expression() {
        NodePtr left = not_expression();
        while (is_name("and")) {
            const std::size_t offset = tokens_[next_++].offset;
            left                     = binary(NodeKind::logical_and, offset, std::move(left), not_expression());
        }
        return left;
    }
    NodePtr not_expression() {
        if (!is_name("not")) return compare();
        const Level level(*this);
        NodePtr     n = make(NodeKind::logical_not);
        next_++;
        add(n, not_expression());
        return n;
    }
    NodePtr compare() {
        NodePtr first = sum();
        NodePtr n;
        for (;;) {
            std::string op;
            for (std::string_view o : {"==", "!=", "<", "<=", ">", ">="})
                if (is_op(o)) op = o;
            std::size_t words = 1;
            if (is_name("in")) op = "in";
            if (is_name("not") && is_name("in", 1)) op = "not in", words = 2;
            if (op.empty()) return n ? std::move(n) : std::move(first);
            if (!n) {
                n = make(NodeKind::compare);
                add(n, std::move(first));
            }
            next_ += words;
            n->operators.push_back(op);
            add(n, sum());
        }
    }
    NodePtr sum() {
        NodePtr left = concat();
        while (is_op("+") || is_op("-")) {
            const Lexeme& t    = tokens_[next_++];
            const auto    kind = t.text == "+" ? NodeKind::add : NodeKind::subtract;
            left               = binary(kind, t.offset, std::move(left), concat());
        }
        return left;
    }
    NodePtr concat() {
        NodePtr first = product();
        if (!is_op("~")) return first;
        NodePtr n = make(NodeKind::concat);
        add(n, std::move(first));
        while (skip_op("~")) add(n, product());
        return n;
    }
    NodePtr product() {
        NodePtr left = power();
        for (;;) {
            NodeKind kind{};
            if (is_op("*")) kind = NodeKind::multiply;
            else if (is_op("/")) kind = NodeKind::divide;
            else if (is_op("//")) kind = NodeKind::floor_divide;
            else if (is_op("%")) kind = NodeKind::modulo;
            else return left;
            const std::size_t offset = tokens_[next_++].offset;
            left                     = binary(kind, offset, std::move(left), power());
        }
    }
    NodePtr power() {
        NodePtr left = unary(true);
        while (is_op("**")) {
            const std::size_t offset = tokens_[next_++].offset;
            left                     = binary(NodeKind::power, offset, std::move(left), unary(true));
        }
        return left;
    }
    NodePtr unary(bool with_filter) {
        const Level level(*this);
        NodePtr     n;
        if (is_op("-") || is_op("+")) {
            n = make(is_op("-") ? NodeKind::negate : NodeKind::plus);
            next_++;
            add(n, unary(false));
        } else {
            n = primary();
        }
        n = postfix(std::move(n));
        return with_filter ? filters_and_tests(std::move(n)) : std::move(n);
    }

    static std::optional<Value> constant_named(std::string_view name) {
        if (name == "true" || name == "True") return Value(true);
        if (name == "false" || name == "False") return Value(false);
        if (name == "none" || name == "None") return Value(None{});
        return std::nullopt;
    }

    NodePtr primary() {
        const Lexeme& t = at();
        NodePtr       n = make(NodeKind::constant);
        switch (t.kind) {
            case TokenKind::name:
                next_++;
                if (auto constant = constant_named(t.text)) {
                    n->value = *constant;
                } else {
                    n->kind = NodeKind::name;
                    n->id   = program_.id(t.text);
                    uses_.caller |= t.text == "caller", uses_.varargs |= t.text == "varargs",
                        uses_.kwargs |= t.text == "kwargs";
                }
                return n;
            case TokenKind::text: {
                std::string text;
                while (at().kind == TokenKind::text) text += tokens_[next_++].text;
                n->value = Value(std::string_view(text));
                return n;
            }
            case TokenKind::integer: n->value = t.integer, next_++; return n;
            case TokenKind::real: n->value = t.real, next_++; return n;
            default: break;
        }
        if (skip_op("(")) {
            NodePtr inside = tuple_expression(true, true);
            expect_op(")");
            return inside;
        }
        if (skip_op("[")) {
            n->kind = NodeKind::list;
            while (!is_op("]")) {
                if (!n->kids.empty()) expect_op(",");
                if (is_op("]")) break;
                add(n, expression());
            }
            expect_op("]");
            return n;
        }
        if (skip_op("{")) {
            n->kind = NodeKind::dict;
            while (!is_op("}")) {
                if (!n->kids.empty()) expect_op(",");
                if (is_op("}")) break;
                add(n, expression());
                expect_op(":");
                add(n, expression());
            }
            expect_op("}");
            return n;
        }
        unexpected("an expression");
    }

    NodePtr postfix(NodePtr n) {
        for (;;) {
            if (is_op(".")) {
                NodePtr outer = make(NodeKind::attribute);
                next_++;
                if (at().kind == TokenKind::integer) { // x.0
                    outer->kind = NodeKind::item;
                    NodePtr key = make(NodeKind::constant);
                    key->value  = tokens_[next_++].integer;
                    add(outer, std::move(n));
                    add(outer, std::move(key));
                } else {
                    outer->text = expect_name();
                    add(outer, std::move(n));
                }
                n = std::move(outer);
            } else if (is_op("[")) {
                n = subscript(std::move(n));
            } else if (is_op("(")) {
                n = call(std::move(n));
            } else {
                return n;
            }
        }
    }
    NodePtr subscript(NodePtr object) {
        NodePtr n = make(NodeKind::item);
        next_++;
        add(n, std::move(object));
        NodePtr begin = is_op(":") ? nullptr : expression();
        if (is_op(":")) {
            n->kind = NodeKind::slice;
            add(n, std::move(begin));
            next_++;
            add(n, is_op("]") || is_op(":") ? nullptr : expression());
            add(n, skip_op(":") && !is_op("]") ? expression() : nullptr);
        } else {
            if (is_op(",")) {
                NodePtr tuple = make(NodeKind::tuple);
                add(tuple, std::move(begin));
                while (skip_op(",") && !is_op("]")) add(tuple, expression());
                begin = std::move(tuple);
            }
            add(n, std::move(begin));
        }
        expect_op("]");
        return n;
    }
    // (positional, name=value, *list, **dict) into the node.
    void arguments(const NodePtr& n) {
        expect_op("(");
        bool first = true;
        while (!is_op(")")) {
            if (!std::exchange(first, false)) expect_op(",");
            if (is_op(")")) break;
            if (skip_op("**")) {
                n->star_named = expression();
                deepen(*n, *n->star_named);
            } else if (skip_op("*")) {
                n->star = expression();
                deepen(*n, *n->star);
            } else if (at().kind == TokenKind::name && is_op("=", 1)) {
                const std::string name = expect_name();
                next_++;
                NodePtr value = expression();
                deepen(*n, *value);
                n->named.emplace_back(name, std::move(value));
            } else {
                if (!n->named.empty() || n->star_named) fail("a positional argument follows a named one");
                add(n, expression());
            }
        }
        expect_op(")");
    }
    NodePtr call(NodePtr function) {
        NodePtr n = make(NodeKind::call);
        n->offset = function->offset;
        add(n, std::move(function));
        arguments(n);
        return n;
    }

    NodePtr filters_and_tests(NodePtr n) {
        for (;;) {
            if (is_op("|")) n = filters(std::move(n), false);
            else if (is_name("is")) n = test(std::move(n));
            else if (is_op("(")) n = call(std::move(n));
            else return n;
        }
    }
    std::string dotted_name() {
        std::string name = expect_name();
        while (skip_op(".")) name += "." + expect_name();
        return name;
    }
    // `named_first`: the first filter stands without a bar, as in a filter block.
    NodePtr filters(NodePtr value, bool named_first) {
        while (named_first || is_op("|")) {
            if (!named_first) next_++;
            named_first = false;
            NodePtr n   = make(NodeKind::filter);
            n->text     = dotted_name();
            if (!vocabulary_.filter(n->text) && conditions_ == 0)
                throw SyntaxFault{cat("no filter named ", quote(n->text)), n->offset};
            add(n, std::move(value));
            if (is_op("(")) arguments(n);
            value = std::move(n);
        }
        return value;
    }
    NodePtr test(NodePtr value) {
        next_++;
        NodePtr n  = make(NodeKind::test);
        n->negated = skip_name("not");
        n->offset  = std::uint32_t(at().offset);
        n->text    = dotted_name();
        if (!vocabulary_.test(n->text) && conditions_ == 0)
            throw SyntaxFault{cat("no test named ", quote(n->text)), n->offset};
        add(n, std::move(value));
        const TokenKind k             = at().kind;
        const bool      value_follows = k == TokenKind::name || k == TokenKind::text || k == TokenKind::integer ||
                                   k == TokenKind::real || is_op("[") || is_op("{");
        if (is_op("(")) {
            arguments(n);
        } else if (value_follows && !is_name("else") && !is_name("or") && !is_name("and")) {
            if (is_name("is")) fail("tests cannot be chained with is");
            add(n, postfix(primary()));
        }
        return n;
    }

    Program&            program_;
    const Vocabulary&   vocabulary_;
    const ParseLimits&  limits_;
    std::vector<Lexeme> tokens_;
    std::size_t         next_  = 0;
    int                 level_ = 0, loops_ = 0, conditions_ = 0;
    Uses                uses_;
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
