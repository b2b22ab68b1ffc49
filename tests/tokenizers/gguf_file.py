"""The metadata of a GGUF file as a dictionary, and back: as much of the format as a file with nothing but a vocabulary needs."""
import struct

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    at = 8

    def take(form):
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def text():
        nonlocal at
        (n,) = take("Q")
        at += n
        return data[at - n : at]

    def value(kind):
        if kind == STRING:
            return text()
        if kind != ARRAY:
            return take(FORMATS[kind])[0]
        kind, n = take("IQ")
        return [text() for _ in range(n)] if kind == STRING else list(take(f"{n}{FORMATS[kind]}"))

    _, n = take("QQ")
    metadata = {}
    for _ in range(n):
        key = text().decode()
        metadata[key] = value(*take("I"))
    return metadata


def write(path, metadata):
    """Values: bool, int, float, bytes, str, bytearray (an array of bytes), lists of one of these."""

    def text(value):
        raw = value if isinstance(value, bytes) else value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def encoded(value):
        if isinstance(value, bytearray):
            return struct.pack("<IIQ", ARRAY, 0, len(value)) + bytes(value)
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<Ii", 5, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, (bytes, str)):
            return struct.pack("<I", STRING) + text(value)
        if isinstance(value[0], (bytes, str)):
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
        kind = 6 if isinstance(value[0], float) else 5
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + struct.pack(f"<{len(value)}{FORMATS[kind]}", *value)

    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)))
        for key, value in metadata.items():
            file.write(text(key) + encoded(value))
