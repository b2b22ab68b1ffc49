// quire.serve.openai.translated_fields: shared by the translations of other APIs' requests into chats. Owns nothing.
export module quire.serve.openai.translated_fields;

import quire.core.base;
import quire.serve.api.json_fields;

export namespace quire {

// Copies the members that `f` was not asked for: fields of quire's own, such as its samplers', have one meaning in every API. Fails for
// fields whose result only the answer to a chat can show.
void pass_on(JsonFields& f, const Json& body, Json& chat);

// A member that has to be a list of objects, or empty.
const Json& objects_of(JsonFields& f, const std::string& name, int most);

} // namespace quire

module :private;

namespace quire {

const std::vector<std::string_view> only_chats = split(
    "n best_of use_beam_search beam_width logprobs n_probs prompt_logprobs echo prompt messages stop max_tokens "
    "max_completion_tokens n_predict functions function_call response_format return_token_ids return_tokens "
    "top_logprobs post_sampling_probs return_progress timings_per_token");

const Json no_objects = Json::array();

void pass_on(JsonFields& f, const Json& body, Json& chat) {
    const std::set<std::string> read = f.seen();
    for (auto at = body.begin(); at != body.end(); ++at) {
        if (read.contains(at.key()) || at->is_null()) continue;
        if (std::ranges::find(only_chats, at.key()) != only_chats.end())
            return f.fail(at.key(), cat(at.key(), " belongs to /v1/chat/completions"));
        chat[at.key()] = at.value();
    }
    f.pass_recording(only_chats);
}

const Json& objects_of(JsonFields& f, const std::string& name, int most) {
    const Json* v = f.find(name);
    f.describe(name, R"({"type":"array","items":{"type":"object"}})");
    if (!v) return no_objects;
    if (!v->is_array()) f.fail(name, cat(name, " is ", type_name(*v), "; it has to be a list"));
    else if (v->size() > std::size_t(most))
        f.fail(name, cat(name, " has ", v->size(), " of them; ", most, " are allowed"));
    else {
        std::size_t i = 0;
        for (const Json& item : *v) {
            if (!item.is_object()) {
                f.fail(name, cat(name, "[", i, "] is ", type_name(item), "; it has to be an object"));
                return no_objects;
            }
            i++;
        }
        return *v;
    }
    return no_objects;
}

} // namespace quire
