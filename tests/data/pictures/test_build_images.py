"""Records with images: from each form of data to a prompt file and back, hostile images included."""

import base64
import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hostile_images import READ, hostile_images
from PIL import Image
from tiny_vl import IMAGE, VISION_END, VISION_START, write_tiny_vl

from mindrlhf.data.build import build_prompts
from mindrlhf.data.encoding import EncoderSettings, RecordEncoder
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.readers import RawRecord
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.images.geometry import PixelLimits, VisionGeometry
from mindrlhf.images.pixels import decode_image

LIMITS = PixelLimits(2 * 784, 12 * 784)
SIZES = [(56, 56), (140, 100), (30, 60), (300, 200)]
HOSTILE = hostile_images()


def picture(number, kind="PNG"):
    width, height = SIZES[number % len(SIZES)]
    noise = np.random.default_rng(number).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR).save(buffer, kind)
    return buffer.getvalue()


FILES = [picture(number, kind) for number, kind in enumerate(("PNG", "JPEG", "WEBP", "PNG"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_vl(tmp_path_factory.mktemp("model"))


def text_of(ids):
    """The text of a prompt; an image as the number of its tokens in brackets."""
    tokens = [int(token) for token in ids]
    text, place = b"", 0
    while place < len(tokens):
        if tokens[place] == IMAGE:
            length = next((n for n, token in enumerate(tokens[place:]) if token != IMAGE), len(tokens) - place)
            text += b"[%d]" % length
            place += length
        else:
            names = {VISION_START: b"<", VISION_END: b">", 257: b"{", 258: b"}"}
            text += names.get(tokens[place]) or bytes([BYTE_OF[tokens[place]]])
            place += 1
    return text.decode()


def _byte_of_token():
    """GPT-2's alphabet, sorted: printable bytes stand for themselves, the others follow from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {**{chr(byte): byte for byte in plain}, **{chr(256 + n): byte for n, byte in enumerate(others)}}
    return [characters[character] for character in sorted(characters)]


BYTE_OF = _byte_of_token()


def build(model, output, rows, handler, **options):
    """Build from ``rows``, as Parquet if any value is bytes, and return the file."""
    path = output.with_suffix(".parquet" if b"" in options.pop("kinds", [b""]) else ".jsonl")
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"template": "plain", "max_prompt_length": 200, "num_workers": 1} | options
    limits = {"min_pixels": LIMITS.min_pixels, "max_pixels": LIMITS.max_pixels}
    build_prompts([path], output, model, handler=handler, **limits | options)
    return PromptFile.open(output, load_tokenizer(model).fingerprint)


def tokens_of(file):
    height, width, _ = decode_image(file, LIMITS).shape
    return height * width // 784


def test_geo3k(model, tmp_path):
    rows = [
        {"images": [{"bytes": FILES[n], "path": None}], "problem": f"<image>Find x{n}.", "answer": f"{n}"}
        for n in range(4)
    ]
    prompts = build(model, tmp_path / "o.mindrecord", rows, "geo3k")
    records = prompts.read([2, 0, 1, 3])
    assert [record.answer for record in records] == ["2", "0", "1", "3"]
    for number, record in zip((2, 0, 1, 3), records):
        want = decode_image(FILES[number], LIMITS)
        assert len(record.images) == 1 and np.array_equal(record.images[0], want)
        assert text_of(record.prompt_ids) == f"<[{want.shape[0] * want.shape[1] // 784}]>Find x{number}.\n"
    header = prompts.header.images
    assert (header.num_images, header.num_records, header.most_images, header.image_token) == (4, 4, 1, IMAGE)
    assert header.most_tokens == max(map(tokens_of, FILES)) <= LIMITS.max_tokens
    assert (header.limits, header.geometry) == (LIMITS, VisionGeometry())
    assert prompts.header.longest_prompt == max(len(record.prompt_ids) for record in records)


def test_geo3k_in_row_groups_with_several_images_paths_and_rows_of_text(model, tmp_path):
    """A file as the hub serves it: images as structs of bytes and path, of which either may be missing."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "wrong.jpg").write_bytes(FILES[2])  # a WebP: what the file holds counts, not its name
    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    fields = [("images", pyarrow.list_(struct)), ("problem", pyarrow.string()), ("answer", pyarrow.string())]
    rows = [
        {"images": [{"bytes": FILES[0], "path": "absent.png"}], "problem": "<image>a", "answer": "1"},
        {"images": [], "problem": "b", "answer": "2"},
        {"images": [{"path": "pictures/wrong.jpg"}, {"bytes": FILES[3]}], "problem": "<image>c<image>", "answer": "3"},
        {"images": [{"bytes": FILES[n]} for n in (1, 0, 1)], "problem": "d", "answer": "4"},
        {"images": [], "problem": "e", "answer": "5"},
    ]
    path = tmp_path / "geo3k.parquet"
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, path, row_group_size=2, compression="zstd")
    output = tmp_path / "o.mindrecord"
    limits = {"min_pixels": LIMITS.min_pixels, "max_pixels": LIMITS.max_pixels}
    build_prompts([path], output, model, handler="geo3k", template="plain", max_prompt_length=200, **limits)
    prompts = PromptFile.open(output, load_tokenizer(model).fingerprint)
    tokens = [tokens_of(file) for file in FILES]
    records = prompts.read(range(5))
    assert [text_of(record.prompt_ids) for record in records] == [
        f"<[{tokens[0]}]>a\n",
        "b\n",
        f"<[{tokens[2]}]>c<[{tokens[3]}]>\n",
        f"<[{tokens[1]}]><[{tokens[0]}]><[{tokens[1]}]>d\n",
        "e\n",
    ]
    assert [record.answer for record in records] == ["1", "2", "3", "4", "5"]
    for record, numbers in zip(records, ([0], [], [2, 3], [1, 0, 1], [])):
        assert len(record.images) == len(numbers)
        for pixels, number in zip(record.images, numbers):
            assert np.array_equal(pixels, decode_image(FILES[number], LIMITS))
    header = prompts.header.images
    assert (header.num_images, header.num_records, header.most_images) == (6, 3, 3)


def test_verl_with_several_images_and_rows_of_text_in_the_chat_template(model, tmp_path):
    def row(content, images, answer):
        return {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": content}],
            "images": images and [{"bytes": FILES[n], "path": f"{n}.png"} for n in images],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": 0},
        }

    rows = [
        row("Is <image> in <image>?", [0, 1], "a"),
        row("1+1?", None, "2"),
        row("2+2?", [], "4"),
        row("Why?", [3], "b"),
    ]
    prompts = build(model, tmp_path / "o.mindrecord", rows, "verl", template="chat")
    records = prompts.read(range(4))
    tokens = [tokens_of(file) for file in FILES]
    turn = "{system\nThink.}\n{user\n%s}\n{assistant\n"
    assert [text_of(record.prompt_ids) for record in records] == [
        turn % f"Is <[{tokens[0]}]> in <[{tokens[1]}]>?",
        turn % "1+1?",
        turn % "2+2?",
        turn % f"<[{tokens[3]}]>Why?",  # a text without marks has its images in front
    ]
    assert [[image.shape for image in record.images] for record in records] == [
        [decode_image(FILES[n], LIMITS).shape for n in own] for own in ([0, 1], [], [], [3])
    ]
    header = prompts.header.images
    assert (header.num_images, header.num_records, header.most_images) == (3, 2, 2)


def test_verl_without_images_is_text(model, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "What is an <image> tag?"}], "reward_model": {"ground_truth": "1"}}]
    prompts = build(model, tmp_path / "o.mindrecord", rows, "verl")
    (record,) = prompts.read([0])
    assert prompts.header.images is None and record.images == ()
    assert text_of(record.prompt_ids) == "What is an <image> tag?\n"


def test_json_lines_with_paths_base64_and_parts_of_messages(model, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "0.png").write_bytes(FILES[0])
    encoded = [base64.b64encode(file).decode() for file in FILES]
    part = {"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{encoded[2]}"}}
    rows = [
        {"q": "<image>a", "pics": "pictures/0.png"},
        {"q": "b<image>", "pics": [encoded[1]]},
        {"q": [{"role": "user", "content": [{"type": "text", "text": "c"}, part, {"type": "text", "text": "d"}]}]},
        {
            "q": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "e"}]}],
            "pics": [{"path": "pictures/0.png"}],
        },
        {"q": "f"},
    ]
    key_map = {"question": "q", "images": "pics"}
    prompts = build(model, tmp_path / "o.mindrecord", rows, "map_keys", key_map=key_map, kinds=[])
    tokens = [tokens_of(file) for file in FILES]
    assert [text_of(record.prompt_ids) for record in prompts.read(range(5))] == [
        f"<[{tokens[0]}]>a\n", f"b<[{tokens[1]}]>\n", f"c<[{tokens[2]}]>d\n", f"<[{tokens[0]}]>e\n", "f\n",
    ]  # fmt: skip


def test_supervised_records_keep_their_images_and_bounds_count_image_tokens(model, tmp_path):
    rows = [{"q": "?", "r": "yes", "pics": [FILES[n]]} for n in range(4)]
    lengths = [tokens_of(file) + 4 for file in FILES]  # two tokens around an image, the question, a line break
    key_map = {"question": "q", "response": "r", "images": "pics"}
    limit = max(lengths) - 1
    prompts = build(
        model, tmp_path / "o.mindrecord", rows, "map_keys",
        key_map=key_map, task="sft", max_prompt_length=limit, max_length=limit + 4,
    )  # fmt: skip
    kept = [n for n in range(4) if lengths[n] <= limit]
    assert (prompts.header.num_kept, prompts.header.num_too_long) == (len(kept), 4 - len(kept))
    assert prompts.header.images.num_images == len(kept)
    assert 0 < len(kept) < 4
    for number, record in zip(kept, prompts.read(range(len(kept)))):
        assert len(record.prompt_ids) == lengths[number] and len(record.response_ids) == 4
        assert np.array_equal(record.images[0], decode_image(FILES[number], LIMITS))


def test_worker_processes_change_nothing(model, tmp_path):
    rows = [{"images": [FILES[n % 4]], "problem": f"<image>{n}", "answer": "1"} for n in range(6)]
    first, second = (
        build(model, tmp_path / f"{workers}.mindrecord", rows, "geo3k", num_workers=workers).read(range(6))
        for workers in (1, 2)
    )
    assert [record.image_files for record in first] == [record.image_files for record in second]
    assert [record.prompt_ids.tolist() for record in first] == [record.prompt_ids.tolist() for record in second]


def encoder(model, **options):
    settings = {
        "tokenizer_path": str(model), "handler": "geo3k", "key_map": {}, "template": "plain",
        "system": None, "task": "prompts", "max_prompt_length": 200, "max_length": None,
        "source_names": {"data.jsonl": "data.jsonl"}, "min_pixels": LIMITS.min_pixels, "max_pixels": LIMITS.max_pixels,
    }  # fmt: skip
    return RecordEncoder(EncoderSettings(**settings | options))


def encode(encoder, rows, path="data.jsonl"):
    return encoder.encode([RawRecord(Path(path), number, row, 0) for number, row in enumerate(rows, 1)])


def test_every_hostile_image_is_read_or_named_with_its_record_and_a_reason(model):
    assert len(HOSTILE) >= 40
    rows = [{"images": [FILES[0], file], "problem": "?", "answer": "1"} for file, _ in HOSTILE.values()]
    chunk = encode(encoder(model), rows)
    found = {bad.number: str(bad) for bad in chunk.bad_records}
    wrong = {}
    for number, (name, (_, reason)) in enumerate(HOSTILE.items(), 1):
        says = found.get(number)
        if reason == READ:
            is_right = says is None
        else:
            is_right = says is not None and says.startswith(f"data.jsonl:{number}: image 2 of 2: ") and reason in says
        if not is_right:
            wrong[name] = says
    assert wrong == {}
    assert len(chunk.records) + len(chunk.bad_records) == chunk.num_read == len(HOSTILE)
    assert all(len(record.image_files) == 2 for record in chunk.records)


def test_hostile_images_end_a_build_or_are_counted(model, tmp_path):
    rows = [{"images": [file], "problem": "?", "answer": "1"} for file, _ in HOSTILE.values()]
    first = next(number for number, (_, reason) in enumerate(HOSTILE.values(), 1) if reason)
    num_bad = sum(reason != READ for _, reason in HOSTILE.values())
    with pytest.raises(UserError, match=rf"\.parquet:{first}: image 1 of 1: .*--skip-bad"):
        build(model, tmp_path / "o.mindrecord", rows, "geo3k")
    prompts = build(model, tmp_path / "o.mindrecord", rows, "geo3k", skip_bad=True)
    assert (prompts.header.num_bad, prompts.header.num_kept) == (num_bad, len(rows) - num_bad)
    assert prompts.header.images.num_images == len(rows) - num_bad


def test_sources_that_may_not_or_cannot_be_read_are_named(model, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(FILES[0])
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "circle.png").symlink_to(root / "circle.png")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe.png")
    (root / "huge.png").touch()
    os.truncate(root / "huge.png", 65 << 20)
    cases = {
        "../secret.png": "lies outside",
        str(tmp_path / "secret.png"): "lies outside",
        "link.png": "lies outside",
        "circle.png": "no image file",
        "folder": "is not a file",
        "pipe.png": "is not a file",
        "huge.png": "over 64 MiB",
        "absent.png": "no image file 'absent.png'",
        "https://example.com/a.png": "nothing is downloaded",
        "file:///etc/passwd": "nothing is downloaded",
        "data:image/png;base64,*": "not as base64",
        "A" * 70 + "*": "not as base64",
        "x\0y": "no image file",
        "": "given as str",
    }
    others = {3: "given as int", None: "given as NoneType"}
    cases |= others
    rows = [{"images": [FILES[0], source], "problem": "?", "answer": "1"} for source in cases]
    reader = encoder(model, source_names={str(root / "a.jsonl"): "a.jsonl"})
    chunk = encode(reader, rows, root / "a.jsonl")
    says = [str(bad) for bad in chunk.bad_records]
    assert len(says) == len(cases)
    for text, (source, reason) in zip(says, cases.items()):
        assert reason in text, (source, text)
    elsewhere = encoder(model, source_names={str(root / "a.jsonl"): "a.jsonl"}, image_root=str(tmp_path))
    rows = [{"images": ["secret.png"], "problem": "?", "answer": "1"}]
    assert len(encode(elsewhere, rows, root / "a.jsonl").records) == 1


@pytest.mark.parametrize(
    ("handler", "row", "reason"),
    [
        ("geo3k", {"problem": "<image>?", "answer": "1"}, "has 1 places for images, the record has 0"),
        ("geo3k", {"problem": "<image>?", "answer": "1", "images": []}, "1 places for images, the record has 0"),
        (
            "geo3k",
            {"problem": "<image>?", "answer": "1", "images": [b"", b""]},
            "1 places for images, the record has 2",
        ),
        ("verl", {"prompt": [{"role": "user", "content": "<image>"}], "images": None}, "1 places for images"),
        ("verl", {"prompt": [{"role": "user", "content": "?"}], "videos": ["a.mp4"]}, "only images are supported"),
        ("verl", {"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "part of type 'video'"),
        (
            "verl",
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 places for images, the record has 0",
        ),
        (
            "verl",
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>"}]}]},
            "writes <image> out",
        ),
        ("deepscaler", {"problem": "?", "answer": "1", "images": ["a.png"]}, "handler 'deepscaler' does not read"),
        ("deepscaler", {"problem": "?", "answer": "1", "image": "a.png"}, "handler 'deepscaler' does not read"),
    ],
)
def test_images_that_nobody_would_see_are_errors(model, handler, row, reason):
    (bad,) = encode(encoder(model, handler=handler), [row | {"reward_model": {"ground_truth": "1"}}]).bad_records
    assert reason in bad.reason


def test_a_model_without_eyes_gets_no_images(model, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    rows = [{"images": [FILES[0]], "problem": "<image>?", "answer": "1"}]
    blind = encoder(tmp_path, min_pixels=None, max_pixels=None)
    (bad,) = encode(blind, rows).bad_records
    assert "has no preprocessor_config.json: its model sees none" in bad.reason
    with pytest.raises(UserError, match="its model sees no images"):
        encoder(tmp_path)


def test_templates_that_leave_images_out_and_texts_that_forge_them_are_errors(model, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    row = {"images": [FILES[0]], "problem": "<image>?", "answer": "1"}
    (bad,) = encode(encoder(model, template=str(tmp_path / "t.jinja")), [row]).bad_records
    assert bad.reason == "the prompt has 0 <|image_pad|>, the record has 1 images"
    forged = row | {"problem": "<image>? <|image_pad|>"}
    (record,) = encode(encoder(model), [forged]).records
    assert text_of(record.prompt_ids) == f"<[{tokens_of(FILES[0])}]>? < |image_pad|>\n"
    (bad,) = encode(encoder(model, keep_control_tokens=True), [forged]).bad_records
    assert bad.reason == "the prompt has 2 <|image_pad|>, the record has 1 images"


def test_images_that_do_not_fit_a_record_are_errors(model):
    noise = np.random.default_rng(0).integers(0, 256, (1400, 1400, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    rows = [{"images": [buffer.getvalue()] * 2, "problem": "?", "answer": "1"}]
    (bad,) = encode(encoder(model, max_pixels=1400 * 1400), rows).bad_records
    assert "MiB as PNG, a record holds 7: choose a lower --max-pixels" in bad.reason


def test_a_key_of_images_that_no_record_has_is_an_error(model, tmp_path):
    with pytest.raises(UserError, match="no record has images in 'pictures'"):
        build(
            model, tmp_path / "o.mindrecord", [{"q": "a"}], "map_keys", key_map={"question": "q", "images": "pictures"}
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "names the image processor 'CLIPImageProcessor'"),
        ({"image_std": [0, 1, 1]}, "is damaged"),
        ({"patch_size": "x"}, "is damaged"),
        ({"image_mean": [0.5]}, "is damaged"),
    ],
)
def test_processors_that_are_not_known_are_refused(model, tmp_path, change, words):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    fields = json.loads((model / "preprocessor_config.json").read_text()) | change
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=words):
        encoder(tmp_path)


def test_limits_come_from_either_form_of_the_processors_config(model, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    fields = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "image_mean": [0.5] * 3}
    fields["size"] = {"shortest_edge": 4096, "longest_edge": 65536}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    processor = encoder(tmp_path, min_pixels=None, max_pixels=None).pictures.processor
    assert processor.limits == PixelLimits(4096, 65536, 32)
    assert (processor.geometry.patch, processor.geometry.mean) == (16, (0.5, 0.5, 0.5))
    assert encoder(tmp_path, min_pixels=None, max_pixels=8192).pictures.processor.limits == PixelLimits(4096, 8192, 32)
