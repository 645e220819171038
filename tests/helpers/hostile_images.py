"""Image files that are broken, huge, odd or made to do harm, and what reading each must come to."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, PngImagePlugin

READ = ""  # it is read; anything else is part of the reason why it is not


def hostile_images() -> dict[str, tuple[bytes, str]]:
    """Return name -> (file, part of the reason for refusing it)."""
    return _no_images() | _damaged() | _too_large_or_small() | _several() | _other_pixels() | _odd_but_whole()


def _picture(mode: str = "RGB", size: tuple[int, int] = (84, 56)) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR).convert(mode)


def _file(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, bits: int = 8, colour: int = 2, data: bytes = b"", more: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + more + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _changed(data: bytes, position: int, byte: int = 0xFF) -> bytes:
    return data[:position] + bytes([data[position] ^ byte]) + data[position + 1 :]


def _no_images() -> dict[str, tuple[bytes, str]]:
    unknown = "not an image of a known format"
    return {
        "nothing": (b"", unknown),
        "text": (b"see figure 3", unknown),
        "page of an error": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", unknown),
        "drawing of lines": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', unknown),
        "document": (b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n", unknown),
        "program of PostScript": (_file(_picture(), "EPS"), unknown),
        "icon": (_file(_picture(size=(32, 32)), "ICO"), unknown),
        "JPEG 2000": (_file(_picture(), "JPEG2000"), unknown),
        "archive": (b"PK\x03\x04" + bytes(60), unknown),
        "video": (b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2avc1mp41" + bytes(100), unknown),
        "noise behind the head of a JPEG": (b"\xff\xd8\xff\xe0" + bytes(range(256)) * 4, unknown),
    }


def _damaged() -> dict[str, tuple[bytes, str]]:
    png, jpeg, webp = (_file(_picture(), kind) for kind in ("PNG", "JPEG", "WEBP"))
    data = png.index(b"IDAT") + 4
    return {
        "PNG cut off": (png[: len(png) // 2], "broken"),
        "PNG without its end": (png[:-12], "broken"),
        "PNG of a head alone": (png[:8], "known format"),
        "PNG with another byte in its pixels": (_changed(png, data + 200), "broken"),
        "PNG with another byte in its size": (_changed(png, 19), "known format"),
        "PNG without pixels": (_png(84, 56), "broken"),
        "PNG with too few pixels": (_png(84, 56, data=zlib.compress(bytes(100))), "broken"),
        "PNG with pixels that are not packed": (_png(84, 56, data=bytes(500)), "broken"),
        "JPEG cut off": (jpeg[: len(jpeg) // 2], "broken"),
        "JPEG of a head alone": (jpeg[:4], "known format"),
        "WebP cut off": (webp[: len(webp) // 2], "broken"),
        "GIF cut off": (_file(_picture("P"), "GIF")[:900], "broken"),
        "TIFF cut off": (_file(_picture(), "TIFF")[:-3000], "broken"),
        "TIFF whose pages go in a circle": (_circle_of_pages(), READ),
        "BMP that says it is longer": (_file(_picture(), "BMP")[:2000], "broken"),
        "PPM cut off": (_file(_picture(), "PPM")[:500], "broken"),
    }


def _circle_of_pages() -> bytes:
    """A TIFF whose list of pages leads back to its first one."""
    data = bytearray(_file(_picture(), "TIFF"))
    (place,) = struct.unpack("<I", data[4:8])
    (num_entries,) = struct.unpack("<H", data[place : place + 2])
    end = place + 2 + 12 * num_entries
    data[end : end + 4] = struct.pack("<I", place)
    return bytes(data)


def _too_large_or_small() -> dict[str, tuple[bytes, str]]:
    blank = zlib.compress(bytes((20000 // 8 + 1) * 20000), 1)
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * (4 << 20), zip=True)
    limit = "over the limit of 64 Mi"
    return {
        "bomb: a small file of 400 million pixels": (_png(20000, 20000, 1, 0, blank), "than the limit of 64 Mi"),
        "bomb: a text that unpacks to 4 MiB": (_file(_picture(), pnginfo=text), "too large"),
        "head that says 65,535 x 65,535": (_png(65535, 65535), "than the limit of 64 Mi"),
        "more pixels than the limit": (_png(9000, 9000, 1, 0, zlib.compress(bytes(1126 * 9000), 9)), limit),
        "one pixel": (_file(_picture(size=(4, 4)).resize((1, 1))), "1 x 1 pixels show nothing"),
        "a line": (_file(_picture(size=(100, 4)).resize((100, 1))), "show nothing"),
        "no width": (_png(0, 56), "known format"),
        "no height": (_png(84, 0), "known format"),
        "too narrow": (_file(_picture(size=(8, 1800)).resize((8, 1800))), "over 200 to 1"),
        "too narrow for the limits": (_file(Image.new("RGB", (30, 4000))), "no size of"),
    }


def _several() -> dict[str, tuple[bytes, str]]:
    frames = [_picture(size=(56, 56)), _picture(size=(56, 56)).transpose(Image.Transpose.ROTATE_90)]
    several = {"save_all": True, "append_images": frames[1:]}
    return {
        "GIF that moves": (_file(frames[0], "GIF", **several), "2 frames or pages"),
        "PNG that moves": (_file(frames[0], "PNG", **several), "2 frames or pages"),
        "WebP that moves": (_file(frames[0], "WEBP", **several), "2 frames or pages"),
        "TIFF of two pages": (_file(frames[0], "TIFF", **several), "2 frames or pages"),
        "MPO of a phone, a preview behind the picture": (_file(frames[0], "MPO", **several), READ),
    }


def _other_pixels() -> dict[str, tuple[bytes, str]]:
    grey16 = Image.fromarray(np.arange(56 * 84, dtype=np.uint16).reshape(56, 84) * 13)
    wide = np.zeros((56, 84), np.int32)
    colour16 = b"".join(b"\0" + bytes(84 * 6) for _ in range(56))
    see_through = _picture("RGBA")
    see_through.putalpha(0)
    transparent = _picture("P")
    return {
        "16 bits of grey": (_file(grey16), "save it with 8 bits"),
        "32 bits of grey": (_file(Image.fromarray(wide), "TIFF"), "save it with 8 bits"),
        "floating point": (_file(Image.fromarray(wide.astype(np.float32)), "TIFF"), "save it with 8 bits"),
        "Lab colours": (_file(Image.new("LAB", (84, 56)), "TIFF"), "save it with 8 bits"),
        "16 bits a colour, of which Pillow keeps 8": (_png(84, 56, 16, 2, zlib.compress(colour16)), READ),
        "CMYK": (_file(_picture("CMYK"), "JPEG"), READ),
        "black and white": (_file(_picture("1")), READ),
        "palette": (_file(_picture("P")), READ),
        "palette with a transparent colour": (_file(transparent, transparency=3), READ),
        "palette with many transparent colours": (_file(transparent, transparency=bytes(range(256))), READ),
        "grey with transparency": (_file(_picture("LA")), READ),
        "wholly transparent": (_file(see_through), READ),
    }


def _odd_but_whole() -> dict[str, tuple[bytes, str]]:
    turned = Image.Exif()
    turned[0x0112] = 6
    wrong_turn = Image.Exif()
    wrong_turn[0x0112] = 99
    return {
        "turned by EXIF": (_file(_picture(), "JPEG", exif=turned), READ),
        "EXIF with a turn that does not exist": (_file(_picture(), "JPEG", exif=wrong_turn), READ),
        "EXIF of noise": (_file(_picture(), "JPEG", exif=b"Exif\0\0" + bytes(range(200))), READ),
        "PNG with something behind its end": (_file(_picture()) + b"x" * 1000, READ),
        "progressive JPEG": (_file(_picture(), "JPEG", progressive=True), READ),
        "two by two": (_file(_picture(size=(8, 8)).resize((2, 2))), READ),
    }
