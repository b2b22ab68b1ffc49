// Attention over the paged KV cache: online softmax (running row max and row sum; sums are rescaled when the row max grows) over
// chunks of 64 positions, with register tiles of queries × positions and queries × dimensions.
//
// Positions that a query does not see get the weight zero, so that queries can be computed together. But the product of zero with a NaN or
// an infinity in V is a NaN: then each query is computed alone, over the positions that it sees.

// One token's head.
struct Query {
    const float* q;
    std::int64_t position;
};
static_assert(sizeof(Query) == attention_query_floats * sizeof(float));

// One chunk as floats: K transposed (by dimension), so that a vector holds 16 positions, and V by position.
struct Chunk {
    float* k;    // [head_dim × 64]
    float* v;    // [64 × padded_v]
    float* rows; // [16 × padded], on the way to k
    int    padded, padded_v;
};

// Bytes of a number or code of K or V.
INLINE std::size_t kv_bytes(DType type) {
    return type == DType::F32 ? 4 : type == DType::F16 || type == DType::BF16 ? 2 : 1;
}

// Where a position's row lies, and its scales or null.
struct KvRow {
    const std::byte* row;
    const std::byte* scales;
};
INLINE KvRow kv_row(const AttentionTask& task, const KvRows& rows, const std::int32_t* table, int p) {
    const std::size_t block = std::size_t(table[p / task.block_size]) * task.block_stride;
    const auto        in    = std::size_t(p % task.block_size);
    return {rows.data + block + in * std::size_t(task.head_dim) * kv_bytes(rows.type),
            rows.scales ? rows.scales + block + in * sizeof(float) * (task.latent ? 2 : 1) : nullptr};
}

template <bool Fma>
INLINE void key_row(const AttentionTask& task, const std::int32_t* table, int p, float* out) {
    const auto [row, scales] = kv_row(task, task.k, table, p);
    const int first          = task.latent && scales ? task.value_dim : task.head_dim; // numbers of the first scale
    widen_kv<Fma>(task.k.type, row, scales, out, first);
    if (first < task.head_dim)
        widen_kv<Fma>(task.k.type, row + std::size_t(first) * kv_bytes(task.k.type), scales + sizeof(float),
                      out + first, task.head_dim - first);
}

// Numbers first .. first + n - 1.
template <bool Fma>
INLINE void value_row(const AttentionTask& task, const std::int32_t* table, int p, int first, int n, float* out) {
    const auto [row, scales] = kv_row(task, task.v, table, p);
    widen_kv<Fma>(task.v.type, row + std::size_t(first) * kv_bytes(task.v.type), scales, out, n);
}

template <bool Fma>
INLINE void load_chunk(const AttentionTask& task, const AttentionPart& part, int chunk, int from, int to,
                       const Chunk& c) {
    const auto width = std::size_t(c.padded);
    for (int p = from; p < to && c.v; p++)
        value_row<Fma>(task, part.v_table, p, 0, task.value_dim,
                       c.v + std::size_t(p - chunk) * std::size_t(c.padded_v));
    for (int first = from / 16 * 16; first < to; first += 16) {
        for (int p = std::max(first, from); p < std::min(first + 16, to); p++)
            key_row<Fma>(task, part.table, p, c.rows + std::size_t(p - first) * width);
        for (int d = 0; d < c.padded; d += 4) {
            i32x16 transposed[4];
            transpose(reinterpret_cast<const std::byte*>(c.rows + d), width * sizeof(float), transposed);
            for (int i = 0; i < 4; i++) STORE16(c.k + (d + i) * attention_chunk + (first - chunk), transposed[i]);
        }
    }
}

// Whether V of positions a .. b-1 of the chunk is finite.
INLINE bool finite_values(const Chunk& c, int a, int b) {
    i32x16 special{};
    for (int i = a * c.padded_v; i < b * c.padded_v; i += 16) {
        i32x16 v;
        LOAD16(v, c.v + i);
        special |= (v & 0x7f800000) == 0x7f800000;
    }
    return __builtin_reduce_or(special) == 0;
}

// Microkernel for q · Kᵀ and weights · V, a register tile of Q rows × 16 · V columns:
// out[i][16 · V] = out[i][16 · V] · rescale[i] (0 without rescale) + Σ over steps first .. last-1 of a[i][step] · b[step][16 · V].
// For scores the columns are positions and the steps dimensions; for the output the columns are dimensions and the steps positions.
template <bool Fma, int Q, int V>
INLINE void weighted_sums(const float* const* a, const float* b, std::int64_t b_width, int first, int last,
                          const float* rescale, float* const* out) {
    f32x16 sum[Q][V];
    UNROLLED for (int i = 0; i < Q; i++) UNROLLED for (int j = 0; j < V; j++) sum[i][j] = f32x16{};
    for (int step = first; step < last; step++) {
        f32x16 v[V];
        UNROLLED for (int j = 0; j < V; j++) LOAD16(v[j], b + step * b_width + 16 * j);
        UNROLLED for (int i = 0; i < Q; i++) {
            const f32x16 w = ALL(a[i][step]);
            UNROLLED for (int j = 0; j < V; j++) VECTOR_FMA(sum[i][j], w, v[j], sum[i][j]);
        }
    }
    UNROLLED for (int i = 0; i < Q; i++) UNROLLED for (int j = 0; j < V; j++) {
        f32x16 old{};
        if (rescale) LOAD16(old, out[i] + 16 * j);
        if (rescale) sum[i][j] += old * rescale[i];
        STORE16(out[i] + 16 * j, sum[i][j]);
    }
}

// Scales one query's scores of a chunk, of which it sees positions a .. b-1; the others become -inf. Returns the largest.
template <bool Fma>
INLINE float scale_scores(float* score, int a, int b, float scale, float softcap) {
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = f32x16{} - std::numeric_limits<float>::infinity(), hidden = best;
    for (int j = 0; j < attention_chunk; j += 16) {
        f32x16       s;
        const i32x16 seen = (lane + j >= a) & (lane + j < b);
        LOAD16(s, score + j);
        s *= scale;
        if (softcap > 0) softcap16<Fma>(&s, softcap);
        s    = (f32x16)(((i32x16)s & seen) | ((i32x16)hidden & ~seen));
        best = __builtin_elementwise_max(best, s);
        STORE16(score + j, s);
    }
    return largest_lane(best);
}

// Converts scores into weights exp(score - highest), and returns the sum of the weights.
template <bool Fma>
INLINE float scores_to_weights(float* score, int a, int b, float highest) {
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 total{};
    for (int j = 0; j < attention_chunk; j += 16) {
        f32x16       s;
        const i32x16 seen = (lane + j >= a) & (lane + j < b);
        LOAD16(s, score + j);
        s -= highest;
        STORE16(score + j, s);
        exp16<Fma>(score + j, score + j);
        LOAD16(s, score + j);
        s = (f32x16)((i32x16)s & seen);
        total += s;
        STORE16(score + j, s);
    }
    float lanes[16];
    STORE16(lanes, total);
    return sum_lanes(lanes);
}

// Converts one query's scores of a chunk, of which it sees positions a .. b-1, into weights exp(score - row max), and updates row max
// and row sum. Returns the factor by which the earlier sums are rescaled.
template <bool Fma>
INLINE float online_softmax(float* score, int a, int b, float scale, float softcap, float* row_max, float* row_sum) {
    const float highest = std::max(*row_max, scale_scores<Fma>(score, a, b, scale, softcap));
    const float sum     = scores_to_weights<Fma>(score, a, b, highest);
    const float rescale = *row_max == highest ? 1.0f : std::exp(*row_max - highest);
    *row_max            = highest;
    *row_sum            = *row_sum * rescale + sum;
    return rescale;
}

// q · Kᵀ of Q queries and a chunk.
template <bool Fma, int Q, int V>
INLINE void chunk_scores(const float* const* q, const float* k, int head_dim, float* const* row) {
    float *out[Q], ones[Q];
    for (int i = 0; i < Q; i++) ones[i] = 1;
    for (int j = 0; j < attention_chunk; j += 16 * V) {
        for (int i = 0; i < Q; i++) out[i] = row[i] + j;
        for (int d = 0; d < head_dim; d += 32) // sums of sums: shorter chains round less
            weighted_sums<Fma, Q, V>(q, k + j, attention_chunk, d, std::min(d + 32, head_dim), d > 0 ? ones : nullptr,
                                     out);
    }
}

// Queries first .. first + Q - 1 over a chunk, of which `from` .. `to` are there.
template <bool Fma, int Q, int V>
INLINE void chunk_queries(const AttentionTask& task, const Query* query, const Chunk& c, int chunk, int from, int to,
                          int first, float* acc, float* row_max, float* row_sum, float* scores) {
    const float* q[Q];
    float *      row[Q], *out[Q], rescale[Q];
    int          low = attention_chunk, high = 0; // the positions that any of the queries sees
    for (int i = 0; i < Q; i++) {
        q[i]   = query[first + i].q;
        row[i] = scores + i * attention_chunk;
    }
    chunk_scores<Fma, Q, V>(q, c.k, task.head_dim, row);
    for (int i = 0; i < Q; i++) {
        const int position = int(query[first + i].position);
        const int a        = std::max(from, first_seen(task, position)) - chunk;
        const int b        = std::min(to, position + 1) - chunk;
        rescale[i]         = 1;
        if (a < b) {
            rescale[i] =
                online_softmax<Fma>(row[i], a, b, task.scale, task.softcap, row_max + first + i, row_sum + first + i);
            low = std::min(low, a), high = std::max(high, b);
        } else {
            std::fill(row[i], row[i] + attention_chunk, 0.0f);
        }
    }
    int d = 0;
    for (; d + 16 * V <= c.padded_v; d += 16 * V) {
        for (int i = 0; i < Q; i++) out[i] = acc + (first + i) * c.padded_v + d;
        weighted_sums<Fma, Q, V>(row, c.v + d, c.padded_v, low, high, rescale, out);
    }
    for (; d < c.padded_v; d += 16) {
        for (int i = 0; i < Q; i++) out[i] = acc + (first + i) * c.padded_v + d;
        weighted_sums<Fma, Q, 1>(row, c.v + d, c.padded_v, low, high, rescale, out);
    }
}

template <bool Fma, int Q, int V>
INLINE void attention_body(const AttentionTask& task) {
    const int D = task.head_dim, padded = (D + 15) / 16 * 16, value_dim = task.value_dim,
              padded_v = (value_dim + 15) / 16 * 16;
    int n_queries      = 0;
    for (const AttentionPart& part : task.parts) n_queries += part.n_tokens * task.n_heads;
    float* at   = task.scratch;
    auto   take = [&](int n) __attribute__((always_inline)) {
        float* begin = at;
        at += n;
        return begin;
    };
    const Chunk c{take(padded * attention_chunk), take(attention_chunk * padded_v), take(16 * padded), padded,
                  padded_v};
    float *     scores = take(Q * attention_chunk), *acc = take(n_queries * padded_v);
    auto*       query   = reinterpret_cast<Query*>(take(n_queries * int(sizeof(Query) / sizeof(float))));
    float *     row_max = take(n_queries), *row_sum = take(n_queries);
    std::fill(acc, acc + n_queries * padded_v, 0.0f);
    // A sink is a first score, with a value of zero.
    for (int i = 0; i < n_queries; i++) {
        row_max[i] = task.sinks ? task.sinks[i % task.n_heads] : -std::numeric_limits<float>::infinity();
        row_sum[i] = task.sinks ? 1.0f : 0.0f;
    }
    for (int p = 0; p < attention_chunk && value_dim < padded_v; p++) // the padding of V's rows stays zero
        std::fill(c.v + p * padded_v + value_dim, c.v + (p + 1) * padded_v, 0.0f);
    int next = 0;
    for (const AttentionPart& part : task.parts)
        for (int t = 0; t < part.n_tokens; t++)
            for (int h = 0; h < task.n_heads; h++)
                query[next++] = {part.q + t * task.q_stride + h * D,
                                 part.last >= 0 ? part.last : part.first_position + t};

    const auto pass = [&](int chunk, int from, int to, int first, int last, bool apart) __attribute__((always_inline)) {
        int i = first;
        for (; !apart && i + Q <= last; i += Q)
            chunk_queries<Fma, Q, V>(task, query, c, chunk, from, to, i, acc, row_max, row_sum, scores);
        for (; i < last; i++)
            chunk_queries<Fma, 1, V>(task, query, c, chunk, from, to, i, acc, row_max, row_sum, scores);
    };
    // The shared chunks first, then the chunks of each part: a query processes its chunks in the same order as if it were alone.
    const int n_shared_chunks = task.shared / attention_chunk;
    int       first           = 0;
    for (int p = -1; p < int(task.parts.size()); p++) {
        const AttentionPart& part  = task.parts[std::size_t(std::max(p, 0))];
        const int            end   = p < 0            ? task.shared // of what is visible
                                     : part.last >= 0 ? part.last + 1
                                                      : part.first_position + part.n_tokens;
        const int            begin = first_seen(task, part.first_position);
        const int            last  = p < 0 ? n_queries : first + part.n_tokens * task.n_heads;
        for (int i = p < 0 ? 0 : std::max(n_shared_chunks, begin / attention_chunk); i * attention_chunk < end; i++) {
            const int chunk = i * attention_chunk, from = std::max(chunk, begin),
                      to = std::min(chunk + attention_chunk, end);
            load_chunk<Fma>(task, part, chunk, from, to, c);
            const bool all_see =
                p < 0 || part.n_tokens == 1 || part.last >= 0 || (task.window == 0 && to <= part.first_position + 1);
            pass(chunk, from, to, first, last, !all_see && !finite_values(c, from - chunk, to - chunk));
        }
        if (p >= 0) first = last;
    }
    next = 0;
    for (const AttentionPart& part : task.parts)
        for (int t = 0; t < part.n_tokens; t++)
            for (int h = 0; h < task.n_heads; h++, next++) {
                float* out = part.out + t * task.out_stride + h * value_dim;
                for (int d = 0; d < value_dim; d++) out[d] = acc[next * padded_v + d] / row_sum[next];
            }
}

// -- one token's attention in three passes (SplitAttention), with the arithmetic and the order of the functions above

// The i-th chunk that the token sees: where the chunk begins, and which of its positions the token sees.
struct SeenChunk {
    int chunk, from, to;
};
INLINE SeenChunk seen_chunk(const AttentionTask& task, int i) {
    const int position = task.parts[0].first_position;
    const int begin    = first_seen(task, position);
    const int chunk    = (begin / attention_chunk + i) * attention_chunk;
    return {chunk, std::max(chunk, begin), std::min(chunk + attention_chunk, position + 1)};
}

template <bool Fma, int Q, int V>
INLINE void attention_scores_body(const AttentionTask& task, const SplitAttention& split, int first, int last) {
    const int   D = task.head_dim, padded = (D + 15) / 16 * 16;
    const Chunk c{task.scratch, nullptr, task.scratch + padded * attention_chunk, padded, 0};
    const auto  row_of = [&](int h, int i) __attribute__((always_inline)) {
        return split.scores + (std::int64_t(h) * split.n_chunks + i) * attention_chunk;
    };
    for (int i = first; i < last; i++) {
        const SeenChunk seen = seen_chunk(task, i);
        load_chunk<Fma>(task, task.parts[0], seen.chunk, seen.from, seen.to, c);
        int h = 0;
        for (; h + Q <= task.n_heads; h += Q) {
            const float* q[Q];
            float*       row[Q];
            for (int j = 0; j < Q; j++) q[j] = task.parts[0].q + (h + j) * D, row[j] = row_of(h + j, i);
            chunk_scores<Fma, Q, V>(q, c.k, D, row);
        }
        for (; h < task.n_heads; h++) {
            const float* q   = task.parts[0].q + h * D;
            float*       row = row_of(h, i);
            chunk_scores<Fma, 1, V>(&q, c.k, D, &row);
        }
        for (h = 0; h < task.n_heads; h++)
            split.highest[h * split.n_chunks + i] =
                scale_scores<Fma>(row_of(h, i), seen.from - seen.chunk, seen.to - seen.chunk, task.scale, task.softcap);
    }
}

template <bool Fma>
INLINE void attention_weights_body(const AttentionTask& task, const SplitAttention& split, int first, int last) {
    for (int h = 0; h < task.n_heads; h++) {
        const std::int64_t row     = std::int64_t(h) * split.n_chunks;
        float              row_max = task.sinks ? task.sinks[h] : -std::numeric_limits<float>::infinity();
        for (int i = 0; i < first; i++) row_max = std::max(row_max, split.highest[row + i]);
        for (int i = first; i < last; i++) {
            const SeenChunk seen    = seen_chunk(task, i);
            const float     highest = std::max(row_max, split.highest[row + i]);
            split.sums[row + i]     = scores_to_weights<Fma>(split.scores + (row + i) * attention_chunk,
                                                             seen.from - seen.chunk, seen.to - seen.chunk, highest);
            split.rescale[row + i]  = row_max == highest ? 1.0f : std::exp(row_max - highest);
            row_max                 = highest;
        }
    }
}

// Adds the i-th chunk, of which the token sees low .. high-1, to the sums of heads h .. h + Q - 1. v [64 × padded], acc [n_heads × padded].
template <bool Fma, int Q, int V>
INLINE void head_values(const SplitAttention& split, int i, int h, const float* v, int padded, int low, int high,
                        float* acc) {
    const float* row[Q];
    float *      out[Q], rescale[Q];
    for (int j = 0; j < Q; j++) {
        row[j]     = split.scores + (std::int64_t(h + j) * split.n_chunks + i) * attention_chunk;
        rescale[j] = split.rescale[(h + j) * split.n_chunks + i];
    }
    int d = 0;
    for (; d + 16 * V <= padded; d += 16 * V) {
        for (int j = 0; j < Q; j++) out[j] = acc + (h + j) * padded + d;
        weighted_sums<Fma, Q, V>(row, v + d, padded, low, high, rescale, out);
    }
    for (; d < padded; d += 16) {
        for (int j = 0; j < Q; j++) out[j] = acc + (h + j) * padded + d;
        weighted_sums<Fma, Q, 1>(row, v + d, padded, low, high, rescale, out);
    }
}

template <bool Fma, int Q, int V>
INLINE void attention_values_body(const AttentionTask& task, const SplitAttention& split, int first, int last) {
    const AttentionPart& part = task.parts[0];
    const int            n = last - first, padded = (n + 15) / 16 * 16;
    float* const         v   = task.scratch;
    float* const         acc = v + attention_chunk * padded;
    std::fill(v, acc + task.n_heads * padded, 0.0f); // the padding of V's rows stays zero
    for (int i = 0; i < split.n_chunks; i++) {
        const SeenChunk seen = seen_chunk(task, i);
        for (int p = seen.from; p < seen.to; p++)
            value_row<Fma>(task, part.v_table, p, first, n, v + (p - seen.chunk) * padded);
        const int low = seen.from - seen.chunk, high = seen.to - seen.chunk;
        int       h = 0;
        for (; h + Q <= task.n_heads; h += Q) head_values<Fma, Q, V>(split, i, h, v, padded, low, high, acc);
        for (; h < task.n_heads; h++) head_values<Fma, 1, V>(split, i, h, v, padded, low, high, acc);
    }
    for (int h = 0; h < task.n_heads; h++) {
        float row_sum = task.sinks ? 1.0f : 0.0f;
        for (int i = 0; i < split.n_chunks; i++)
            row_sum = row_sum * split.rescale[h * split.n_chunks + i] + split.sums[h * split.n_chunks + i];
        for (int d = 0; d < n; d++) part.out[h * task.value_dim + first + d] = acc[h * padded + d] / row_sum;
    }
}
