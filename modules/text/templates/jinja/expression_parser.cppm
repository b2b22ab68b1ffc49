// quire.text.templates.jinja.expression_parser: tokens to the tree of one expression, by Jinja's grammar. **Owns** the tokens of a template.
export module quire.text.templates.jinja.expression_parser;

import quire.core.base;
import quire.text.templates.jinja.ast;
import quire.text.templates.jinja.lexer;

export namespace quire::jinja {

struct ParseLimits {
    std::size_t bytes   = std::size_t(1) << 20; // of the source
    int         nesting = 200;                  // of nodes in one another
};

// The filters and tests that a program may name; asked while parsing, as in Jinja.
struct Vocabulary {
    bool (*filter)(std::string_view name);
    bool (*test)(std::string_view name);
};

// The parser of a template is derived from this one, so both read on from one token. Throws SyntaxFault.
class ExpressionParser {
public:
    ExpressionParser(Program& program, const Vocabulary& vocabulary, const ParseLimits& limits)
        : program_(program), vocabulary_(vocabulary), limits_(limits), tokens_(lex(program.source)) {}

protected:
    struct Uses {
        bool caller = false, varargs = false, kwargs = false;
    };

    // One more level of the parser's own recursion.
    struct Level {
        explicit Level(ExpressionParser& p) : parser(p) {
            if (++p.level_ > p.limits_.nesting) p.fail(cat("the template is nested deeper than ", p.limits_.nesting));
        }
        ~Level() { parser.level_--; }
        ExpressionParser& parser;
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

    NodePtr                     tuple_expression(bool conditional = true, bool empty_allowed = false);
    bool                        tuple_ends() const;
    NodePtr                     expression();
    NodePtr                     or_expression();
    NodePtr                     and_expression();
    NodePtr                     not_expression();
    NodePtr                     compare();
    NodePtr                     sum();
    NodePtr                     concat();
    NodePtr                     product();
    NodePtr                     power();
    NodePtr                     unary(bool with_filter);
    NodePtr                     filtered() { return unary(true); }
    NodePtr                     chain(NodePtr (ExpressionParser::*operand)(),
                                      std::initializer_list<std::pair<std::string_view, NodeKind>> operators);
    static std::optional<Value> constant_named(std::string_view name);
    NodePtr                     primary();
    NodePtr                     postfix(NodePtr n);
    NodePtr                     subscript(NodePtr object);
    void                        arguments(const NodePtr& n);
    NodePtr                     call(NodePtr function);
    NodePtr                     filters_and_tests(NodePtr n);
    std::string                 dotted_name();
    NodePtr                     filters(NodePtr value, bool named_first);
    NodePtr                     test(NodePtr value);

    Program&            program_;
    const Vocabulary&   vocabulary_;
    const ParseLimits&  limits_;
    std::vector<Lexeme> tokens_;
    std::size_t         next_  = 0;
    int                 level_ = 0, loops_ = 0, conditions_ = 0;
    Uses                uses_;
};

} // namespace quire::jinja

module :private;

namespace quire::jinja {

NodePtr ExpressionParser::tuple_expression(bool conditional, bool empty_allowed) {
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

bool ExpressionParser::tuple_ends() const {
    return at().kind == TokenKind::variable_end || at().kind == TokenKind::block_end || at().kind == TokenKind::end ||
           is_op(")");
}

NodePtr ExpressionParser::expression() {
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

// Operands between operators of one level, from left to right.
NodePtr ExpressionParser::chain(NodePtr (ExpressionParser::*operand)(),
                                std::initializer_list<std::pair<std::string_view, NodeKind>> operators) {
    NodePtr left = (this->*operand)();
    for (;;) {
        const auto found =
            std::ranges::find_if(operators, [&](const auto& o) { return is_op(o.first) || is_name(o.first); });
        if (found == operators.end()) return left;
        const std::size_t offset = tokens_[next_++].offset;
        left                     = binary(found->second, offset, std::move(left), (this->*operand)());
    }
}

NodePtr ExpressionParser::or_expression() {
    return chain(&ExpressionParser::and_expression, {{"or", NodeKind::logical_or}});
}

NodePtr ExpressionParser::and_expression() {
    return chain(&ExpressionParser::not_expression, {{"and", NodeKind::logical_and}});
}

NodePtr ExpressionParser::sum() {
    return chain(&ExpressionParser::concat, {{"+", NodeKind::add}, {"-", NodeKind::subtract}});
}

NodePtr ExpressionParser::product() {
    return chain(
        &ExpressionParser::power,
        {{"*", NodeKind::multiply}, {"/", NodeKind::divide}, {"//", NodeKind::floor_divide}, {"%", NodeKind::modulo}});
}

NodePtr ExpressionParser::power() { return chain(&ExpressionParser::filtered, {{"**", NodeKind::power}}); }

NodePtr ExpressionParser::not_expression() {
    if (!is_name("not")) return compare();
    const Level level(*this);
    NodePtr     n = make(NodeKind::logical_not);
    next_++;
    add(n, not_expression());
    return n;
}

NodePtr ExpressionParser::compare() {
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

NodePtr ExpressionParser::concat() {
    NodePtr first = product();
    if (!is_op("~")) return first;
    NodePtr n = make(NodeKind::concat);
    add(n, std::move(first));
    while (skip_op("~")) add(n, product());
    return n;
}

NodePtr ExpressionParser::unary(bool with_filter) {
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

std::optional<Value> ExpressionParser::constant_named(std::string_view name) {
    if (name == "true" || name == "True") return Value(true);
    if (name == "false" || name == "False") return Value(false);
    if (name == "none" || name == "None") return Value(None{});
    return std::nullopt;
}

NodePtr ExpressionParser::primary() {
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

NodePtr ExpressionParser::postfix(NodePtr n) {
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

NodePtr ExpressionParser::subscript(NodePtr object) {
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
void ExpressionParser::arguments(const NodePtr& n) {
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

NodePtr ExpressionParser::call(NodePtr function) {
    NodePtr n = make(NodeKind::call);
    n->offset = function->offset;
    add(n, std::move(function));
    arguments(n);
    return n;
}

NodePtr ExpressionParser::filters_and_tests(NodePtr n) {
    for (;;) {
        if (is_op("|")) n = filters(std::move(n), false);
        else if (is_name("is")) n = test(std::move(n));
        else if (is_op("(")) n = call(std::move(n));
        else return n;
    }
}

std::string ExpressionParser::dotted_name() {
    std::string name = expect_name();
    while (skip_op(".")) name += "." + expect_name();
    return name;
}

// `named_first`: the first filter stands without a bar, as in a filter block.
NodePtr ExpressionParser::filters(NodePtr value, bool named_first) {
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

NodePtr ExpressionParser::test(NodePtr value) {
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

} // namespace quire::jinja
