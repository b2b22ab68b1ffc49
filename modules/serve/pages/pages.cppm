// quire.serve.pages.pages: the server's web pages, each one self-contained file, and the Content-Security-Policy by which the browser enforces
// that. Owns nothing.
module;

#include <openssl/evp.h>
#include <openssl/sha.h>

#include "blocks_page_html.h" // made by CMake from blocks_page.html
#include "chat_page_html.h"

export module quire.serve.pages.pages;

import quire.core.base;

export namespace quire {

struct Page {
    std::string_view path, html;
    std::string policy; // Content-Security-Policy: its own script and style by their hashes, this server, nothing else
};

// "/" (chat) and "/blocks.html" (the block pool, live).
std::vector<Page> pages();

} // namespace quire

module :private;

namespace quire {

// The hash of the text in the first <tag>, as a source of a policy: 'sha256-…'.
std::string hash_of(std::string_view html, std::string_view tag) {
    const std::string                               open = cat("<", tag, ">"), close = cat("</", tag, ">");
    const std::size_t                               begin = html.find(open) + open.size();
    const std::string_view                          text  = html.substr(begin, html.find(close, begin) - begin);
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
    SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
    std::array<unsigned char, 64> base64{};
    const int                     n = EVP_EncodeBlock(base64.data(), digest.data(), int(digest.size()));
    return cat("'sha256-", std::string_view(reinterpret_cast<const char*>(base64.data()), std::size_t(n)), "'");
}

Page page(std::string_view path, std::string_view html) {
    return {path, html,
            cat("default-src 'none'; script-src ", hash_of(html, "script"), "; style-src ", hash_of(html, "style"),
                "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                "require-trusted-types-for 'script'; trusted-types 'none'")};
}

std::vector<Page> pages() { return {page("/", chat_page_html), page("/blocks.html", blocks_page_html)}; }

} // namespace quire
