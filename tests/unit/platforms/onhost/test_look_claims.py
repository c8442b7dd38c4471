"""Who holds a GPU, as a look at a host sees it."""

from __future__ import annotations

import os
import socket
import uuid

from lockstep.platforms.onhost import look


def test_a_holder_that_does_not_answer_holds_its_gpu_all_the_same() -> None:
    gpu = f"GPU-{uuid.uuid4()}"
    assert look.claim_of(gpu) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        holder.bind(look.CLAIM + gpu)
        holder.listen(0)
        silent = look.claim_of(gpu)
        assert silent is not None and (silent["pid"], silent["says"]) == (os.getpid(), look.SILENT)
        crowded = look.claim_of(gpu)  # (the first question still waits, and nobody else gets into the queue)
        assert crowded is not None and crowded["says"] == look.SILENT
    assert look.claim_of(gpu) is None
