// quire.compute.cpu.kernels: chooses the kernels of the CPU backend for this processor.
//
// The kernels are always-inline functions over vectors of 16 floats, in the headers beside this file: gemm.h (integer and float
// GEMM), attention.h, elementwise.h. Each module in isa/ compiles them with a target attribute (none, AVX2, AVX-512 ...), and the
// compiler translates the vectors to the target's registers. So the plain path is the reference for the wide ones, and the program
// starts on any x86-64.
//
// Determinism: the order in which an output element is summed depends only on its own row. GEMM adds with ascending k, in the
// order given in gemm.h; attention processes positions in chunks of 64, counted from the start of the sequence. Register tiles
// over rows and tokens only decide which elements are computed together.
module;

#include <sys/syscall.h>
#include <unistd.h>

export module quire.compute.cpu.kernels;

export import quire.compute.cpu.kernel_table;
import quire.compute.cpu.isa.avx2;
import quire.compute.cpu.isa.avx512;
import quire.compute.cpu.isa.avx512gfni;
import quire.compute.cpu.isa.avx512vnni;
import quire.compute.cpu.isa.avxvnni;
import quire.compute.cpu.isa.plain;
import quire.core.std;

export namespace quire {

// By name ("plain", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512gfni", "amx"), or for "" the widest that processor and
// operating system grant. Null: no such name, or not granted here.
const CpuKernels* cpu_kernels(std::string_view name = "");

} // namespace quire

module :private;

namespace quire {

struct Tables {
    CpuKernels plain = plain_kernels(), avx2 = avx2_kernels(), avxvnni = avxvnni_kernels(avx2),
               avx512 = avx512_kernels(), vnni = avx512vnni_kernels(avx512), gfni = avx512gfni_kernels(avx512, false),
               gfni_pairs = avx512gfni_kernels(avx512, true), amx = amx_kernels(avx512);
};

// Asks Linux for the registers of AMX, which it saves only for processes that ask (arch_prctl, ARCH_REQ_XCOMP_PERM).
bool amx_granted() {
    constexpr int ask = 0x1023, tile_data = 18;
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, ask, tile_data) == 0;
}

const CpuKernels* cpu_kernels(std::string_view name) {
    static const Tables tables;
    // cpuid and xgetbv: the processor has it, and the operating system saves its registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni"), gfni = vnni && __builtin_cpu_supports("gfni");
    // AMD's processors add in four units and multiply in two of them; Intel's do both in the same two. Every AMD processor with VNNI has GFNI.
    if (gfni && (name == "avx512pairs" || (name.empty() && __builtin_cpu_is("amd")))) return &tables.gfni_pairs;
    if (gfni && (name.empty() || name == "amx")) {
        static const bool granted = amx_granted();
        if (granted) return &tables.amx;
    }
    if (gfni && (name.empty() || name == "avx512gfni")) return &tables.gfni;
    if (vnni && (name.empty() || name == "avx512vnni")) return &tables.vnni;
    if (avx512 && (name.empty() || name == "avx512")) return &tables.avx512;
    if (avxvnni && (name.empty() || name == "avxvnni")) return &tables.avxvnni;
    if (avx2 && (name.empty() || name == "avx2")) return &tables.avx2;
    if (name.empty() || name == "plain") return &tables.plain;
    return nullptr;
}

} // namespace quire
