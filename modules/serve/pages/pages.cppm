// quire.serve.pages.pages: the server's web pages, each self-contained but for the libraries of the chat, and the Content-Security-Policy by
// which the browser enforces that. Owns nothing.
module;

#include <openssl/evp.h>
#include <openssl/sha.h>

#include "blocks_page_html.h" // made by CMake from blocks_page.html
#include "chat_page_html.h"
#include "chat_parts.h"
#include "loading_page_html.h"

export module quire.serve.pages.pages;

import quire.core.base;

export namespace quire {

struct Page {
    std::string_view path, type; // type: the Content-Type
    std::string      body;
    std::string policy; // Content-Security-Policy: its own scripts and style by their hashes, this server, nothing else
    std::string_view kept; // Cache-Control
};

// "/" (chat), "/blocks.html" (the block pool, live), and what the chat's page asks for: its libraries, its icon and what it is as an app.
std::vector<Page> pages();

// In place of "/" and "/blocks.html" while the model is loaded, `loaded` of it being there (0 to 1); asks for itself again until then.
Page loading_page(double loaded);

} // namespace quire

module :private;

namespace quire {

// The SHA-256 of a text as policies and integrity attributes write it: sha256-…
std::string hash_of(std::string_view text) {
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
    SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
    std::array<unsigned char, 64> base64{};
    const int                     n = EVP_EncodeBlock(base64.data(), digest.data(), int(digest.size()));
    return cat("sha256-", std::string_view(reinterpret_cast<const char*>(base64.data()), std::size_t(n)));
}

// The text in the first <tag>.
std::string_view inside(std::string_view html, std::string_view tag) {
    const std::string open = cat("<", tag, ">"), close = cat("</", tag, ">");
    const std::size_t begin = html.find(open) + open.size();
    return html.substr(begin, html.find(close, begin) - begin);
}

// `libraries`: a script that the page may run besides its own; may be empty.
Page page(std::string_view path, std::string html, std::string_view libraries = {}) {
    const std::string more = libraries.empty() ? "" : cat(" '", hash_of(libraries), "'");
    std::string       policy =
        cat("default-src 'none'; script-src '", hash_of(inside(html, "script")), "'", more, "; style-src '",
            hash_of(inside(html, "style")),
            "'; connect-src 'self'; img-src 'self' data:; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'");
    return {path, "text/html; charset=utf-8", std::move(html), std::move(policy), "no-cache"};
}

// The chat's page: its libraries stand apart, as a browser keeps them; their address changes with them.
std::string chat_page() {
    const std::string_view libraries = chat_libraries;
    std::string            html      = chat_page_html;
    const std::string_view place     = "@LIBRARIES@";
    const std::string      hash      = hash_of(libraries);
    std::string            version;
    for (char c : hash.substr(7, 12))
        if (c != '+' && c != '/') version += c;
    html.replace(html.find(place), place.size(),
                 libraries.empty()
                     ? ""
                     : cat("<script src=\"/libraries.js?", version, "\" integrity=\"", hash, "\"></script>\n"));
    return html;
}

std::vector<Page> pages() {
    std::vector<Page> all;
    all.push_back(page("/", chat_page(), chat_libraries));
    all.push_back(page("/blocks.html", blocks_page_html));
    const auto part = [&](std::string_view path, std::string_view type, std::string_view body, std::string_view kept) {
        all.push_back({path, type, std::string(body), "default-src 'none'", kept});
    };
    part("/libraries.js", "text/javascript; charset=utf-8", chat_libraries, "max-age=31536000, immutable");
    part("/icon.svg", "image/svg+xml", chat_icon_svg, "max-age=86400");
    part("/manifest.webmanifest", "application/manifest+json", chat_manifest, "max-age=86400");
    return all;
}

Page loading_page(double loaded) {
    std::string            html  = loading_page_html;
    const std::string_view place = "@PERCENT@";
    for (std::size_t at; (at = html.find(place)) != std::string::npos;)
        html.replace(at, place.size(), std::to_string(int(loaded * 100)));
    std::string policy = cat("default-src 'none'; style-src '", hash_of(inside(html, "style")),
                             "'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    return {"", "text/html; charset=utf-8", std::move(html), std::move(policy), "no-store"};
}

} // namespace quire
