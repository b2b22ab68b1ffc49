#compdef quire-chat quire-server quire-bench quire-inspect quire-quantize quire-block-viz
_gnu_generic
