"""Bodies, forms and uploads: what is refused, and what is checked before it is decoded."""

import io
import json
import struct
import zlib

from PIL import Image, ImageFile

from support.fake_runner import EDIT, GENERATE, error_of, over_http, picture
from tritium.serve.settings import Settings


def test_bodies_that_are_no_request():
    async def scenario(http, app):
        headers = {"content-type": "application/json"}
        assert error_of(await http.post(GENERATE, content=b"{", headers=headers)) == (400, "invalid_json", None)
        assert error_of(await http.post(GENERATE, content=b"[]", headers=headers))[0] == 400
        assert error_of(await http.post(GENERATE, content=b"", headers=headers))[0] == 400
        deep = b'{"prompt":' + b"[" * 200_000
        assert error_of(await http.post(GENERATE, content=deep, headers=headers))[0] == 400
        assert (
            error_of(await http.post(GENERATE, content=b'{"prompt":"x","guidance_scale":NaN}', headers=headers))[0]
            == 400
        )
        # A page of another site can send text without asking first.
        plain = {"content-type": "text/plain"}
        assert error_of(await http.post(GENERATE, content=b'{"prompt":"x"}', headers=plain))[0] == 400
        assert error_of(await http.post(GENERATE, json={})) == (400, "missing_required_parameter", "prompt")
        assert error_of(await http.post(EDIT, json={"prompt": "x"})) == (400, "invalid_content_type", None)
        assert error_of(await http.get("/v1/nothing")) == (404, "not_found", None)
        assert error_of(await http.get(GENERATE)) == (405, "method_not_allowed", None)
        assert error_of(await http.get("/v1/videos?limit=0")) == (400, "invalid_value", "limit")
        assert error_of(await http.get("/v1/videos?after=video_x")) == (400, "invalid_value", "after")
        assert app.runner.batches == []

    over_http(scenario)


def test_large_bodies_are_refused_while_they_arrive():
    async def scenario(http, app):
        huge = json.dumps({"prompt": "x" * 3000}).encode()

        async def chunks():
            for start in range(0, len(huge), 500):
                yield huge[start : start + 500]

        headers = {"content-type": "application/json"}
        assert error_of(await http.post(GENERATE, content=huge, headers=headers))[:2] == (413, "too_large")
        assert error_of(await http.post(GENERATE, content=chunks(), headers=headers))[:2] == (413, "too_large")
        response = await http.post(EDIT, files={"image": b"x" * 9000}, data={"prompt": "x"})
        assert error_of(response)[:2] == (413, "too_large")

    over_http(scenario, settings=Settings(max_json_bytes=2000, max_body_bytes=8000, drain_seconds=0.1))


def bomb(width, height):
    """Return a small PNG that claims to be huge."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def gif():
    buffer = io.BytesIO()
    Image.new("P", (8, 8)).save(buffer, "GIF")
    return buffer.getvalue()


def test_uploads_are_checked_before_they_are_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: decoded.append(self))

    async def scenario(http, app):
        async def edit(files, **data):
            return error_of(await http.post(EDIT, files=files, data={"prompt": "x", **data}))

        for image, code in (
            (bomb(5000, 5000), "invalid_image"),
            (bomb(60000, 60000), "invalid_image"),
            (b"not an image", "invalid_image"),
            (gif(), "invalid_image"),
            (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "invalid_image"),
            (picture() + b"\0" * 60_000, "too_large"),
        ):
            # Whatever its name says.
            assert await edit({"image": ("photo.png", image, "image/png")}) in (
                (400, code, "image"),
                (413, code, "image"),
            )
        assert await edit({"mask": picture(mode="RGBA")}) == (400, "missing_required_parameter", "image")
        one = {"image": picture()}
        assert await edit({**one, "mask": picture()}) == (400, "invalid_image", "mask")
        assert await edit({**one, "mask": picture(mode="RGBA", image_format="WEBP")}) == (400, "invalid_image", "mask")
        assert await edit({**one, "mask": picture((0, 0, 0, 0), (32, 32), mode="RGBA")}) == (
            400,
            "invalid_value",
            "mask",
        )
        assert await edit([("image[]", picture())] * 3) == (400, "invalid_value", "image")
        assert await edit({**one, "markup": picture(mode="RGBA")}) == (400, "unsupported_parameter", "markup")
        assert await edit({}, image="/etc/passwd") in (
            (400, "unsupported_parameter", "image"),
            (400, "invalid_content_type", None),
        )
        assert await edit(one, input_fidelity="high") == (400, "unsupported_parameter", "input_fidelity")
        assert await edit(one, tritium="{") == (400, "invalid_value", "tritium")
        assert await edit(one, **{"tritium[loras][][name]": ["ink", "pastel"], "tritium[loras][][scale]": "1"}) == (
            400,
            "invalid_value",
            "loras",
        )
        assert await edit(one, n=["1", "2"]) == (400, "invalid_value", "n")
        assert app.runner.batches == []

    over_http(scenario, settings=Settings(max_upload_bytes=50_000, max_pixels=1_000_000, drain_seconds=0.1))
    assert decoded == []


def test_forms_take_the_extension_as_json_or_by_fields():
    async def scenario(http, app):
        for data in (
            {"tritium": '{"steps": 3, "seed": 7}'},
            {"tritium[steps]": "3", "tritium[seed]": "7"},
            {"num_inference_steps": "3", "seed": "7"},
        ):
            response = await http.post(EDIT, files={"image": picture()}, data={"prompt": "x", **data})
            assert response.status_code == 200, response.text
        assert {(batch[0].steps, batch[0].seed) for batch in app.runner.batches} == {(3, 7)}

    over_http(scenario)
