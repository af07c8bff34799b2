"""Proves and lists a sparse24 checkpoint: python3 read_checkpoint.py RUN/checkpoints/step-NNNNNNNN
`read` gives its state and its tensors, memoryviews of which numpy.asarray makes arrays without a copy. The format is
described in docs/checkpoint-format.md. Pure Python hashes a megabyte per second, the package `blake3` gigabytes."""
import json, pathlib, struct, sys

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
QUARTERS = [bytes.fromhex(q) for q in "0004080c 0105090d 02060a0e 03070b0f 00050a0f 01060b0c 0207080d 0304090e".split()]

def compress(chain, words, counter, length, flags):
    v = [*chain, *IV[:4], counter, 0, length, flags]
    for _ in range(7):
        for (a, b, c, d), pair in zip(QUARTERS, zip(words[::2], words[1::2])):
            for word, (x, y) in zip(pair, ((16, 12), (8, 7))):
                v[a] = (v[a] + v[b] + word) % 2**32
                v[d] = ((v[d] ^ v[a]) * (2**32 + 1) >> x) % 2**32
                v[c] = (v[c] + v[d]) % 2**32
                v[b] = ((v[b] ^ v[c]) * (2**32 + 1) >> y) % 2**32
        words = [words[i] for i in ORDER]
    return [v[i] ^ v[i + 8] for i in range(8)]

def chain(data, chunk, root):
    if len(data) > 1024:
        left = 1 << ((len(data) - 1) // 1024).bit_length() - 1
        halves = chain(data[:1024 * left], chunk, 0) + chain(data[1024 * left:], chunk + left, 0)
        return compress(IV, halves, 0, 64, 4 | root)
    value, blocks = IV, [bytes(data[at:at + 64]) for at in range(0, max(len(data), 1), 64)]
    for i, block in enumerate(blocks):
        flags = (i == 0) | (2 | root if i == len(blocks) - 1 else 0)
        value = compress(value, struct.unpack("<16I", block.ljust(64, b"\0")), chunk, len(block), flags)
    return value

def blake3(data):
    try:
        return __import__("blake3").blake3(data).hexdigest()
    except ImportError:
        return struct.pack("<8I", *chain(data, 0, 8)).hex()

def read(folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    text, tensors = files["manifest.json"], {}
    manifest = json.loads(text)
    assert blake3(text[:-68] + b"0" * 64 + text[-4:]) == manifest["checksum"], "manifest.json is damaged"
    assert (manifest["format"], manifest["format_version"]) in [("sparse24-checkpoint", 1), ("sparse24-checkpoint", 2)], "another format"
    for name, parts in manifest["files"].items():
        data, begins = memoryview(files[name]), [0] + [part["end"] for part in parts]
        assert len(data) == begins[-1], f"{name} has not the length that the manifest says"
        for part, begin in zip(parts, begins):
            assert blake3(data[begin:part["end"]]) == part["blake3"], f"{name} is damaged in {part['name']}"
        if name.endswith(".safetensors"):
            header, data = json.loads(bytes(data[8:begins[1]])), data[begins[1]:]
            views = {t: data[slice(*i["data_offsets"])].cast({"F32": "f", "U16": "H", "U32": "I"}[i["dtype"]], i["shape"])
                     for t, i in header.items() if t != "__metadata__"}
            tensors[name.removesuffix(".safetensors")] = views
    return json.loads(files["state.json"]), tensors

if __name__ == "__main__":
    state, files = read(pathlib.Path(sys.argv[1]))
    for file, name, view in ((file, name, view) for file, views in files.items() for name, view in views.items()):
        print(file, name, *view.shape, view[(0,) * view.ndim])
