// quire.tools.server.presets: the file of --models-preset, in llama.cpp's form: a section is a model, its lines are flags of the server without
// dashes. Owns nothing.
//
//   [*]                  for all models
//   ctx-size = 8192
//   [NAME]               of a file of --models-dir; or any name, with a line model = PATH
//   load-on-startup = true
export module quire.tools.server.presets;

import quire.core.base;
export import quire.tools.common.foreign_flags;
import quire.tools.common.flag_sources;
import quire.tools.common.read_file;

export namespace quire {

struct Preset {
    std::string              name;
    std::vector<std::string> words; // flags, those of [*] first
    bool                     load_on_startup = false;
};

// Why a flag cannot stand in such a file, as the rest of a sentence behind its name; "": it can.
using Misplaced = std::function<std::string(const std::string& flag)>;

// The models in the order of their sections. `all`: gets the words of [*]. Error: the line, and what is wrong with it.
Result<std::vector<Preset>> parse_presets(const std::string& text, const std::string& path, const OwnFlag& own,
                                          const Misplaced& misplaced, Preset& all);
Result<std::vector<Preset>> read_presets(const std::string& path, const OwnFlag& own, const Misplaced& misplaced,
                                         Preset& all);

} // namespace quire

module :private;

namespace quire {

std::string_view bare(std::string_view text) {
    constexpr std::string_view blanks = " \t\r";
    const std::size_t          first  = text.find_first_not_of(blanks);
    return first == std::string_view::npos ? "" : text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

Result<std::vector<Preset>> parse_presets(const std::string& text, const std::string& path, const OwnFlag& own,
                                          const Misplaced& misplaced, Preset& all) {
    struct Line {
        std::string_view text;
        int              number = 0;
    };
    struct Section {
        std::string       name;
        std::vector<Line> lines;
    };
    std::vector<Section>       sections;
    int                        number = 0;
    constexpr std::string_view mark   = "\xef\xbb\xbf"; // of UTF-8, as some editors write it
    std::string_view           rest   = text;
    if (rest.starts_with(mark)) rest.remove_prefix(mark.size());
    const auto where = [&](int line) { return cat(path, ", line ", line, ": "); };
    for (std::string_view raw : split(rest, '\n')) {
        number++;
        const std::string_view line = bare(raw);
        if (line.empty() || line[0] == '#' || line[0] == ';') continue;
        if (line[0] == '[') {
            const std::string name(bare(line.substr(1, line.size() - (line.ends_with(']') ? 2 : 1))));
            if (!line.ends_with(']') || name.empty()) return fail(where(number), "a section is written [NAME]");
            if (std::ranges::find(sections, name, &Section::name) != sections.end())
                return fail(where(number), "there is a section ", quote(name), " already");
            sections.push_back({name, {}});
        } else if (!sections.empty()) sections.back().lines.push_back({line, number});
        else if (bare(line.substr(0, line.find('='))) != "version") // of the format
            return fail(where(number), "a flag stands in a section: [NAME], or [*] for all models");
    }
    const auto read = [&](const Section& section, Preset& preset) -> Result<void> {
        for (const Line& line : section.lines) {
            const std::string key(bare(line.text.substr(0, line.text.find('='))));
            const std::string value(line.text.contains('=') ? bare(line.text.substr(line.text.find('=') + 1)) : "true");
            if (key == "stop-timeout") continue; // a model goes when its requests are answered
            if (key == "load-on-startup") {
                const std::optional<bool> yes = is_yes(value.empty() ? "true" : value); // as of other switches
                if (!yes)
                    return fail(where(line.number), "load-on-startup is true or false, yes or no, on or off; ",
                                quote(value), " is none");
                preset.load_on_startup = *yes;
            } else if (const std::string flag = flag_of_line(line.text);
                       section.name == "*" && (flag == "--model" || flag == "-m")) {
                return fail(where(line.number), "the file of a model stands in the section of that model, not in [*]");
            } else if (const std::string why = misplaced(flag); !why.empty()) {
                return fail(where(line.number), flag, why);
            } else if (auto ok = add_words_of_line(line.text, where(line.number), Program::server, own, preset.words);
                       !ok)
                return ok;
        }
        return {};
    };
    for (const Section& section : sections)
        if (section.name == "*")
            if (auto ok = read(section, all); !ok) return std::unexpected(ok.error());
    std::vector<Preset> models;
    for (const Section& section : sections) {
        if (section.name == "*") continue;
        Preset preset = all;
        preset.name   = section.name;
        if (auto ok = read(section, preset); !ok) return std::unexpected(ok.error());
        models.push_back(std::move(preset));
    }
    return models;
}

Result<std::vector<Preset>> read_presets(const std::string& path, const OwnFlag& own, const Misplaced& misplaced,
                                         Preset& all) {
    const Result<std::string> text = read_file(path);
    if (!text) return std::unexpected(text.error());
    return parse_presets(*text, path, own, misplaced, all);
}

} // namespace quire
