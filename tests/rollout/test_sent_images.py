"""Images in a message: each once, and back at each prompt that shows it."""

import socket

import numpy as np

from mindrlhf.images.pixels import image_digest
from mindrlhf.rollout.sent_images import pack_images, unpack_images
from mindrlhf.system.wire import receive_message, send_message


def picture(height, width, value):
    return np.full((height, width, 3), value, np.uint8)


def test_images_arrive_at_their_prompts_and_travel_once():
    first, second, third = picture(28, 56, 1), picture(56, 28, 1), picture(28, 28, 2)
    prompts = [(first,), (), (second, first, third), (first.copy(),)]
    arrays = pack_images(prompts)
    assert arrays["image_pixels"].nbytes == 3 * 28 * 28 * (2 + 2 + 1)
    left, right = socket.socketpair()
    with left, right:
        send_message(left, {}, {"prompt_lengths": np.ones(4, np.int64), **arrays})
        _, received = receive_message(right)
    found = unpack_images(received)
    assert [len(own) for own in found] == [1, 0, 3, 1]
    for own, images in zip(prompts, found):
        for pixels, image in zip(own, images):
            assert np.array_equal(pixels, image.pixels) and image.digest == image_digest(pixels)


def test_prompts_of_text_add_nothing_to_a_message():
    assert pack_images([(), ()]) == {}
    assert unpack_images({"prompt_lengths": np.ones(2, np.int64)}) == [(), ()]
