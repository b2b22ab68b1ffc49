// quire.core.base: the names that all modules share: those of the standard library, and those of quire.core.result. Owns nothing.
export module quire.core.base;

export import quire.core.result;
export import quire.core.std;
