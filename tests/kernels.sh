#!/bin/sh
# Checks the rule of cuda/warp.cuh: each kernel that may begin early says in its first statement that it waits for its inputs, or that it
# reads something before and waits later. Declarations may stand in front: constants, types, shared memory. Kernels that are launched in
# order begin when the kernel before has ended; those are named here.
set -eu
cd "$(dirname "$0")/.."
in_order=" to_i8_kernel to_f16_kernel largest_scale_kernel dequantize_kernel copy_blocks_kernel report_compiled decode_megakernel "

find cuda -name '*.cu' -o -name '*.cuh' | sort | xargs awk -v in_order="$in_order" '
    # The word in front of the parameters: the first open parenthesis that is not that of the launch bounds.
    function name_of(text,    i, depth, c, at) {
        at = index(text, "__launch_bounds__(")
        if (at) {
            i = at + length("__launch_bounds__")
            do {
                c = substr(text, i++, 1)
                depth += (c == "(") - (c == ")")
            } while (depth > 0 && c != "")
            text = substr(text, i)
        }
        sub(/\(.*/, "", text)
        sub(/.*[^A-Za-z_0-9]/, "", text)
        return text
    }
    function end_of_kernel() {
        if (name == "") return
        n++
        early = (first == "reads_early();")
        if (index(in_order, " " name " ")) {
            if (first == "wait_for_inputs();" || early) print file ": " name " is launched in order, but waits", failed = 1
        } else if (first != "wait_for_inputs();" && !early) {
            print file ": " name " begins with «" first "», not with wait_for_inputs() or reads_early()"
            failed = 1
        } else if (early && !waits) {
            print file ": " name " reads early and never waits"
            failed = 1
        }
        name = ""
    }
    FNR == 1 { end_of_kernel(); file = FILENAME }
    /^(template.*)?__global__/ { end_of_kernel(); head = 1; text = ""; first = ""; waits = 0 }
    head {
        text = text $0 " "
        if ($0 !~ /\{[[:space:]]*$/) next
        head = 0
        name = name_of(text)
        next
    }
    name == "" { next }
    /^}/ { end_of_kernel(); next }
    {
        line = $0
        sub(/\/\/.*/, "", line)
        gsub(/^[[:space:]]+|[[:space:]]+$/, "", line)
        if (line ~ /wait_for_inputs\(\)|load_x<N>|attend_shared</) waits = 1
        if (first != "" || line == "" || line ~ /^#/) next
        if (continues) { continues = (line !~ /;$/); next }
        if (line ~ /^(using|constexpr|static_assert|extern __shared__|__shared__|auto\*)[ (]/) { continues = (line !~ /;$/); next }
        first = line
    }
    END {
        end_of_kernel()
        if (n < 30) { print "only " n " kernels found"; failed = 1 }
        if (!failed) print n " kernels"
        exit failed
    }'
