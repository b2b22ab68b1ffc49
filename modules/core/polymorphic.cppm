// quire.core.polymorphic: a value behind an interface, which is copied with its holder (as C++26's std::polymorphic). **Owns** the value.
export module quire.core.polymorphic;

import quire.core.std;

export namespace quire {

// Holds a value of a type that implements Interface, or nothing.
template <class Interface>
class Polymorphic {
public:
    Polymorphic() = default;
    template <class Value>
        requires(std::derived_from<Value, Interface>)
    Polymorphic(Value value) : value_(std::make_unique<Value>(std::move(value))), copy_(&copy_of<Value>) {}
    Polymorphic(const Polymorphic& other)
        : value_(other.value_ ? other.copy_(*other.value_) : nullptr), copy_(other.copy_) {}
    Polymorphic(Polymorphic&&) noexcept = default;
    Polymorphic& operator=(Polymorphic other) noexcept {
        value_ = std::move(other.value_);
        copy_  = other.copy_;
        return *this;
    }
    ~Polymorphic() = default;

    explicit operator bool() const { return value_ != nullptr; }
    // Only where there is a value.
    Interface&       operator*() { return *value_; }
    const Interface& operator*() const { return *value_; }
    Interface*       operator->() { return value_.get(); }
    const Interface* operator->() const { return value_.get(); }

private:
    using Copy = std::unique_ptr<Interface>(const Interface& value);

    template <class Value>
    static std::unique_ptr<Interface> copy_of(const Interface& value) {
        return std::make_unique<Value>(static_cast<const Value&>(value));
    }

    std::unique_ptr<Interface> value_;
    Copy*                      copy_ = nullptr;
};

} // namespace quire
