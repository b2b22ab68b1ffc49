// Puts the kernels of kernels.h into a table. Included behind the target attribute: this runs on every processor.

// Pairs: prompts by Winograd's inner product.
template <bool Pairs>
void use_integer_kernels(CpuKernels& to) {
    to.repack        = repack;
    to.quantise_rows = quantise_rows<Pairs>;
    to.integer_gemm  = integer_gemm<Pairs>;
}

#if FLOAT_KERNELS
void use_float_kernels(CpuKernels& to) {
    to.token_tiles       = token_tiles;
    to.pack_panels       = pack_panels;
    to.float_gemm        = float_gemm;
    to.attention         = attention;
    to.attention_scores  = attention_scores;
    to.attention_weights = attention_weights;
    to.attention_values  = attention_values;
    to.norm              = norm;
    to.activate          = activate;
    to.convolve          = convolve;
    to.recur             = recur;
    to.softcap           = softcap;
    to.add               = add;
    to.store_kv          = store_kv;
    to.rotate            = rotate;
}
#endif
