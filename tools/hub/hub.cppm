// quire.tools.hub.hub: finds a model on a hub that speaks huggingface.co's protocol (https://huggingface.co/docs/hub/api), or in the cache,
// and fetches what is missing. Which file of a repository is taken is llama.cpp's choice. Owns nothing.
export module quire.tools.hub.hub;

import quire.core.base;
import quire.core.hash;
import quire.core.json;
import quire.tools.hub.cache;
export import quire.tools.hub.fetch;

export namespace quire {

// The words of the flags about a model that is not named by a file here.
struct HubModel {
    std::string repo;            // USER/NAME or USER/NAME:TAG; "": none
    std::string file;            // of the repository; "": by the tag
    std::string url;             // in place of a repository
    std::string token;           // "": HF_TOKEN, or the file in which huggingface_hub keeps it
    bool        offline = false; // nothing is asked; so says HF_HUB_OFFLINE, too
};

// Error: a name or URL that cannot be one.
Result<void> check_hub_model(const HubModel& model);
// Of a checked model: the path of its file, or of its first part: fetched into the cache where it is not there yet. Error: what is wrong, and what to do.
Result<std::string> hub_file(const HubModel& model, const FetchReport& report);

// The files to take among those of a repository: one, or all parts in order. The tag is looked for in the names, as llama.cpp does; without
// one, Q4_K_M, then Q8_0, then the first file. What is no model (mmproj, imatrix and drafts) does not count. `file`: this one, whatever its case.
Result<std::vector<std::string>> choose_files(const std::vector<std::string>& all, const std::string& tag,
                                              const std::string& file);

// The whole models in a cache under the names by which -hf takes them, USER/NAME:TAG: the tag is the end of the file's name behind a dash or a
// dot, in capitals, as llama.cpp has it. One file for each name, that of the branch main if there is one; sorted.
struct NamedModel {
    std::string name, path;   // of the file, or of its first part
    bool        main = false; // of the branch main
};
std::vector<NamedModel> named_models(const std::string& cache);

} // namespace quire

module :private;

namespace quire {

constexpr std::string_view public_hub = "https://huggingface.co"; // without HF_ENDPOINT

std::string lower_case(std::string_view text) {
    std::string out(text);
    for (char& c : out)
        if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    return out;
}

std::string endpoint() {
    for (const char* name : {"HF_ENDPOINT", "MODEL_ENDPOINT"}) {
        std::string url = variable(name);
        while (url.ends_with('/')) url.pop_back();
        if (!url.empty()) return url;
    }
    return std::string(public_hub);
}

bool says_yes(const std::string& text) {
    const std::string value = lower_case(text);
    return value == "1" || value == "true" || value == "yes" || value == "on";
}

// The token as it goes into a header. Error: it cannot.
Result<std::string> token_of(const HubModel& model) {
    std::string token = model.token, source = "--hf-token";
    if (token.empty()) token = variable("HF_TOKEN"), source = "HF_TOKEN";
    if (token.empty() && !says_yes(variable("HF_HUB_DISABLE_IMPLICIT_TOKEN"))) {
        source = variable("HF_TOKEN_PATH");
        if (source.empty() && !hub_home().empty()) source = hub_home() + "/token";
        std::ifstream file(source);
        std::getline(file, token);
    }
    while (!token.empty() && (token.back() == '\n' || token.back() == '\r' || token.back() == ' ')) token.pop_back();
    for (const char c : token)
        if (c <= ' ' || c > '~') return fail("the token of ", source, " has a character that no token has");
    return token;
}

bool is_repo_part(std::string_view text) {
    return !text.empty() && text.size() <= 96 && text[0] != '.' && text.find("..") == std::string_view::npos &&
           text.find("--") == std::string_view::npos &&
           std::ranges::all_of(text, [](char c) { return is_alphanumeric(c) || c == '-' || c == '_' || c == '.'; });
}

// A name of a file inside a repository: no way out of a folder.
bool is_file_name(const std::string& name) {
    if (name.empty() || name.size() > 1024 || name[0] == '/') return false;
    for (std::string_view part : split(name, '/'))
        if (part.empty() || part == "." || part == ".." || part.size() > 255) return false;
    return std::ranges::all_of(name, [](char c) { return (unsigned char)c >= ' ' && c != '\x7f' && c != '\\'; });
}

bool is_digest(std::string_view text, std::size_t n) {
    return text.size() == n && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string url_path(std::string_view text) {
    std::string out;
    for (const char c : text) {
        char code[8];
        std::snprintf(code, sizeof code, "%%%02X", unsigned((unsigned char)c));
        if (is_alphanumeric(c) || std::string_view("-_.~/").find(c) != std::string_view::npos) out += c;
        else out += code;
    }
    return out;
}

double stall_seconds() {
    const auto seconds = to_number<double>(variable("HF_HUB_DOWNLOAD_TIMEOUT"));
    return seconds && *seconds >= 1 && *seconds <= 3600 ? *seconds : 10;
}

// -- which file -------------------------------------------------------------------------------------------

bool is_model_name(std::string_view path) {
    const std::string name = lower_case(path.substr(path.rfind('/') + 1));
    for (std::string_view other : {"mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"})
        if (name.find(other) != std::string::npos) return false;
    return name.ends_with(".gguf");
}

// Whether the tag stands in the name with a dot or a dash behind it.
bool has_tag(const std::string& name, const std::string& tag) {
    const std::string low = lower_case(name), wanted = lower_case(tag);
    for (std::size_t at = low.find(wanted); at != std::string::npos; at = low.find(wanted, at + 1))
        if (const std::size_t end = at + wanted.size(); end < low.size() && (low[end] == '.' || low[end] == '-'))
            return true;
    return false;
}

std::string list_of(const std::vector<std::string>& names) {
    constexpr std::size_t most = 12;
    std::string           text;
    for (std::size_t i = 0; i < std::min(names.size(), most); i++) text += cat(i ? ", " : "", quote(names[i], 100));
    return names.size() > most ? cat(text, " and ", names.size() - most, " more") : text;
}

Result<std::vector<std::string>> choose_files(const std::vector<std::string>& all, const std::string& tag,
                                              const std::string& file) {
    std::vector<std::string> models;
    for (const std::string& name : all)
        if (is_model_name(name)) models.push_back(name);
    std::string chosen;
    if (!file.empty()) {
        for (const std::string& name : all)
            if (chosen.empty() && lower_case(name) == lower_case(file)) chosen = name;
        if (chosen.empty())
            return fail("there is no file ", quote(file, 200), models.empty() ? "" : "; there are ", list_of(models));
    } else {
        if (models.empty())
            return fail("there is no GGUF file: take a repository with GGUF in its name, as user/model-GGUF");
        const std::vector<std::string> tags =
            tag.empty() ? std::vector<std::string>{"Q4_K_M", "Q8_0"} : std::vector<std::string>{tag};
        for (const std::string& one : tags)
            for (const std::string& name : models)
                if (chosen.empty() && has_tag(name, one) && part_of(name).number == 1) chosen = name;
        for (const std::string& name : models)
            if (chosen.empty() && tag.empty() && part_of(name).number == 1) chosen = name;
        if (chosen.empty()) return fail("no file has the type ", quote(tag), "; there are ", list_of(models));
    }
    const std::vector<std::string> parts = parts_of(chosen);
    for (const std::string& one : parts)
        if (std::ranges::find(all, one) == all.end())
            return fail("of the ", parts.size(), " parts of ", quote(chosen, 100), " there is no ", quote(one, 100));
    return parts;
}

std::string tag_of(const std::string& prefix) {
    const std::size_t at = prefix.find_last_of("-./");
    std::string       tag(at == std::string::npos || prefix[at] == '/' ? "" : prefix.substr(at + 1));
    for (char& c : tag) {
        if (!is_alphanumeric(c) && c != '_') return "";
        if (c >= 'a' && c <= 'z') c = char(c - 'a' + 'A');
    }
    return tag;
}

std::vector<NamedModel> named_models(const std::string& cache) {
    std::vector<NamedModel> models;
    for (const CachedModel& one : cached_models(cache)) {
        if (!is_model_name(one.name)) continue;
        const PartName part   = part_of(one.name);
        std::string    prefix = part.prefix;
        if (part.count == 1) prefix.resize(prefix.size() - std::string_view(".gguf").size());
        const bool        whole = std::ranges::all_of(parts_of(one.path), [](const std::string& path) {
            std::error_code ignored;
            return std::filesystem::exists(path, ignored);
        });
        const std::string tag   = tag_of(prefix);
        const std::string main  = cached_repo(cache, one.repo).commit_of("main");
        if (whole)
            models.push_back({tag.empty() ? one.repo : cat(one.repo, ":", tag), one.path,
                              !main.empty() && one.path.contains(cat("/snapshots/", main, "/"))});
    }
    const auto later = [](const auto& a, const auto& b) { return std::tie(a.name, b.main) < std::tie(b.name, a.main); };
    std::stable_sort(models.begin(), models.end(), later);
    const auto same = [](const auto& a, const auto& b) { return a.name == b.name; };
    models.erase(std::unique(models.begin(), models.end(), same), models.end());
    return models;
}

// -- a repository -----------------------------------------------------------------------------------------

struct RepoFile {
    std::string  name, digest; // SHA-256, or of a small file git's SHA-1
    std::int64_t size = -1;
};

struct Listing {
    std::string           commit;
    std::vector<RepoFile> files;
};

// One repository on a hub, at a branch or commit.
struct Repo {
    std::string        hub, name, revision, token;
    const FetchReport& report;

    Error           refusal(const WebAnswer& answer, const std::string& what) const;
    Result<Listing> list(bool& unreachable) const;
    Result<Listing> read_listing(const std::string& text) const;
};

Error Repo::refusal(const WebAnswer& answer, const std::string& what) const {
    const std::string code = answer.header("x-error-code"), where = cat(hub, "/", name);
    if (code == "GatedRepo")
        return {ErrorKind::input, cat(what, ": the model is gated: accept its terms at ", where,
                                      token.empty() ? ", then put a token of your account into HF_TOKEN"
                                                    : " with the account of your token")};
    if (code == "RevisionNotFound")
        return {ErrorKind::input, cat(what, ": there is no version ", quote(revision), " of it at ", hub)};
    if (answer.status == 404 && code == "EntryNotFound")
        return {ErrorKind::input, cat(what, ": there is no such file at ", where)};
    if (answer.status == 401 && !token.empty() && code != "RepoNotFound")
        return {ErrorKind::input, cat(what, ": ", hub, " does not take your token (HF_TOKEN): make a new one")};
    if (answer.status == 401 || answer.status == 404)
        return {ErrorKind::input,
                cat(what, ": there is no such model at ", hub, ", or it is private: check the name",
                    token.empty() ? ", or put a token into HF_TOKEN" : " and the rights of your token")};
    if (answer.status == 403)
        return {ErrorKind::input,
                cat(what, ": ", hub, " does not allow it (403): check the rights of your token (HF_TOKEN)")};
    Error error = describe_failure(what, hub, answer);
    if (answer.status == 429 && token.empty()) error.message += "; with a token in HF_TOKEN it takes more";
    return error;
}

Result<Listing> Repo::read_listing(const std::string& text) const {
    const auto bad = [&](const std::string& what) {
        return fail_with(ErrorKind::system, name, ": the answer of ", hub, " is no list of files: ", what);
    };
    JsonLimits limits;
    limits.bytes                        = std::size_t(64) << 20;
    const Result<JsonDocument> document = json_document(text, limits);
    if (!document) return bad(document.error().message);
    const Json& json = *document;
    const auto  word = [](const Json& in, const char* key) {
        const auto at = in.is_object() ? in.find(key) : in.end();
        return in.is_object() && at != in.end() && at->is_string() ? at->get<std::string>() : std::string();
    };
    const auto number = [](const Json& in, const char* key) -> std::int64_t {
        const auto at = in.is_object() ? in.find(key) : in.end();
        return in.is_object() && at != in.end() && at->is_number_integer() ? at->get<std::int64_t>() : -1;
    };
    Listing listing{word(json, "sha"), {}};
    if (!is_digest(listing.commit, 40)) return bad("it names no commit");
    if (!json.contains("siblings") || !json["siblings"].is_array()) return bad("it has no \"siblings\"");
    for (const Json& one : json["siblings"]) {
        RepoFile file{word(one, "rfilename"), word(one, "blobId"), number(one, "size")};
        if (one.is_object() && one.contains("lfs")) {
            if (const std::string sha = word(one["lfs"], "sha256"); !sha.empty()) file.digest = sha;
            if (const std::int64_t size = number(one["lfs"], "size"); size >= 0) file.size = size;
        }
        if (!is_file_name(file.name)) continue; // nothing that could be fetched
        if (!is_digest(file.digest, 64) && !is_digest(file.digest, 40)) file.digest.clear();
        listing.files.push_back(std::move(file));
    }
    return listing;
}

Result<Listing> Repo::list(bool& unreachable) const {
    const std::string url = cat(hub, "/api/models/", name, "/revision/", url_path(revision), "?blobs=true");
    Patience          patience(report);
    for (;;) {
        constexpr std::size_t most = std::size_t(64) << 20;
        std::string           text;
        WebAnswer answer = web_get({url, token, 0, "", stall_seconds()}, [&](const WebAnswer&, std::string_view bytes) {
            text += bytes;
            return text.size() <= most;
        });
        if (answer.status == 200 && answer.fault.empty()) return read_listing(text);
        if (patience.again(name, answer)) continue;
        unreachable = answer.status < 400 || answer.status == 429 || answer.status >= 500;
        return std::unexpected(answer.status >= 400 ? refusal(answer, name) : describe_failure(name, hub, answer));
    }
}

// The chosen files of a commit that is in the cache, if all are there.
Result<std::string> cached_file(const CachedRepo& cached, const std::string& commit, const std::string& tag,
                                const std::string& file) {
    const auto chosen = choose_files(cached.files(commit), tag, file);
    if (!chosen) return std::unexpected(chosen.error());
    return cached.file(commit, chosen->front());
}

Result<std::string> repo_file(const Repo& repo, const std::string& tag, const std::string& file, bool offline) {
    const std::string cache = hub_cache_folder();
    if (cache.empty()) return fail("there is no folder for models: name one in HF_HUB_CACHE");
    const CachedRepo  cached = cached_repo(cache, repo.name);
    const std::string known  = is_digest(repo.revision, 40) ? repo.revision : cached.commit_of(repo.revision);
    const auto        here   = [&]() -> Result<std::string> {
        if (!is_digest(known, 40)) return fail("it is not in ", cache);
        auto path = cached_file(cached, known, tag, file);
        if (!path) return fail("of what is in ", cached.folder, ", ", path.error().message);
        return path;
    };
    if (offline) {
        auto path = here();
        if (!path)
            return fail_with(ErrorKind::system, repo.name, ": ", path.error().message,
                             "; without --offline (and HF_HUB_OFFLINE) it is fetched");
        return path;
    }
    bool            unreachable = false;
    Result<Listing> listing     = repo.list(unreachable);
    if (!listing) {
        if (!unreachable) return std::unexpected(listing.error());
        auto path = here();
        if (!path) return std::unexpected(listing.error());
        if (repo.report.note) repo.report.note(listing.error().message + "; the copy in the cache is used");
        return path;
    }
    std::vector<std::string> names;
    for (const RepoFile& one : listing->files) names.push_back(one.name);
    const auto chosen = choose_files(names, tag, file);
    if (!chosen) return fail(repo.name, ": ", chosen.error().message);
    for (const std::string& name : *chosen) {
        const RepoFile& one = *std::ranges::find(listing->files, name, &RepoFile::name);
        std::error_code ignored;
        if (std::filesystem::exists(cached.file(listing->commit, name), ignored)) continue;
        if (one.digest.empty())
            return fail_with(ErrorKind::system, repo.name, ": ", repo.hub, " names no digest of ", quote(name, 100),
                             ", so what comes could not be checked");
        RemoteFile remote;
        remote.name          = cat(repo.name, "/", name);
        remote.url           = cat(repo.hub, "/", repo.name, "/resolve/", listing->commit, "/", url_path(name));
        remote.token         = repo.token;
        remote.path          = cached.blob(one.digest);
        remote.lock          = cached.lock(one.digest);
        remote.size          = one.size;
        remote.digest        = one.digest;
        remote.stall_seconds = stall_seconds();
        remote.refused       = [&](const WebAnswer& answer) {
            const bool stored_elsewhere = answer.header("x-error-code").empty(); // the hub names its reason
            if (!stored_elsewhere || (answer.status != 403 && answer.status != 404))
                return repo.refusal(answer, remote.name);
            return Error{ErrorKind::system,
                         cat(remote.name, ": ", repo.hub, " lists the file, but the storage answered with status ",
                                   answer.status, ": try again later")};
        };
        if (auto ok = fetch_file(remote, repo.report); !ok) return std::unexpected(ok.error());
        if (auto ok = cached.link(listing->commit, name, one.digest); !ok) return std::unexpected(ok.error());
    }
    if (!is_digest(repo.revision, 40))
        if (auto ok = cached.set_commit(repo.revision, listing->commit); !ok) return std::unexpected(ok.error());
    return cached.file(listing->commit, chosen->front());
}

// -- a URL ------------------------------------------------------------------------------------------------

// HUB/USER/NAME/resolve/REVISION/FILE (or blob, as a browser shows it): a file of a repository.
struct HubUrl {
    std::string repo, revision, file;
};
std::optional<HubUrl> hub_url(const std::string& url, const std::string& hub) {
    if (!url.starts_with(hub + "/")) return std::nullopt;
    std::string rest                     = url.substr(hub.size() + 1);
    rest                                 = rest.substr(0, rest.find_first_of("?#"));
    const std::vector<std::string> parts = [&] {
        std::vector<std::string> all;
        for (std::string_view part : split(rest, '/')) all.emplace_back(part);
        return all;
    }();
    if (parts.size() < 5 || (parts[2] != "resolve" && parts[2] != "blob")) return std::nullopt;
    const std::size_t head = parts[0].size() + parts[1].size() + parts[2].size() + parts[3].size() + 4;
    HubUrl            found{cat(parts[0], "/", parts[1]), parts[3], rest.substr(head)};
    if (!is_repo_part(parts[0]) || !is_repo_part(parts[1]) || !is_repo_part(parts[3]) || !is_file_name(found.file) ||
        found.file.find('%') != std::string::npos)
        return std::nullopt;
    return found;
}

// A URL anywhere: kept in CACHE/quire/urls, by the name in the URL in a folder for each place.
Result<std::string> url_file(const std::string& url, bool offline, const FetchReport& report) {
    const std::string bare  = url.substr(0, url.find_first_of("?#"));
    const std::size_t slash = bare.rfind('/');
    const std::string place = url.substr(0, slash), name = bare.substr(slash + 1), query = url.substr(bare.size());
    if (origin_of(url).ends_with("//") || slash < bare.find("://") + 3 || !is_file_name(name) || name.size() > 200)
        return fail(quote(url, 200), " is not the URL of a file");
    if (cache_home().empty()) return fail("there is no folder for files: name one in XDG_CACHE_HOME");
    char hash[32];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(hash_bytes(place + query)));
    const std::string              folder = cat(cache_home(), "/quire/urls/", hash);
    const std::vector<std::string> parts  = parts_of(name);
    for (const std::string& one : parts) {
        RemoteFile remote;
        remote.name          = one;
        remote.url           = cat(place, "/", remote.name, query);
        remote.path          = cat(folder, "/", remote.name);
        remote.lock          = cat(folder, "/.", remote.name, ".lock");
        remote.tagged        = true;
        remote.stall_seconds = stall_seconds();
        std::error_code ignored;
        if (offline && std::filesystem::exists(remote.path, ignored)) continue;
        if (offline)
            return fail_with(ErrorKind::system, remote.name, " is not in ", folder,
                             "; without --offline (and HF_HUB_OFFLINE) it is fetched");
        if (auto ok = fetch_file(remote, report); !ok) return std::unexpected(ok.error());
    }
    return cat(folder, "/", parts[0]);
}

// USER/NAME:TAG in two. The tag of llama.cpp's users that means none is "latest".
std::pair<std::string, std::string> repo_and_tag(const std::string& text) {
    const std::size_t colon = text.find(':');
    const std::string tag   = colon == std::string::npos ? "" : text.substr(colon + 1);
    return {text.substr(0, colon), tag == "latest" ? "" : tag};
}

Result<void> check_hub_model(const HubModel& model) {
    if (!model.url.empty() && !origin_of(model.url).starts_with("http"))
        return fail(quote(model.url, 200), " is not a URL that begins with https:// or http://");
    if (model.repo.empty() && !model.file.empty())
        return fail("-hff names a file of a repository: give -hf USER/MODEL, too");
    if (model.repo.empty()) return {};
    const auto [name, tag]  = repo_and_tag(model.repo);
    const std::size_t slash = name.find('/');
    if (slash == std::string::npos || !is_repo_part(name.substr(0, slash)) || !is_repo_part(name.substr(slash + 1)))
        return fail("-hf ", quote(model.repo, 100), " is not USER/MODEL or USER/MODEL:TYPE, as user/model-GGUF:Q4_K_M");
    return {};
}

Result<std::string> hub_file(const HubModel& model, const FetchReport& report) {
    const std::string   hub     = endpoint();
    const bool          offline = model.offline || says_yes(variable("HF_HUB_OFFLINE"));
    Result<std::string> token   = token_of(model);
    if (!token) return token;
    if (!origin_of(hub).starts_with("http"))
        return fail("HF_ENDPOINT is ", quote(hub, 100), ", not a URL as ", public_hub);
    if (!model.url.empty()) {
        const std::optional<HubUrl> found = hub_url(model.url, hub);
        if (!found) return url_file(model.url, offline, report);
        return repo_file({hub, found->repo, found->revision, *token, report}, "", found->file, offline);
    }
    const auto [name, tag] = repo_and_tag(model.repo);
    return repo_file({hub, name, "main", *token, report}, tag, model.file, offline);
}

} // namespace quire
