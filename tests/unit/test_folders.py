"""Folders for this user only are taken over from nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raypool.folders import make_private


def test_a_folder_that_is_made_or_ones_own_is_taken(tmp_path: Path) -> None:
    for _ in range(2):
        folder = make_private(tmp_path / "a" / "b")
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="it is a link"):
        make_private(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o777)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(PermissionError, match="it belongs to user 12345"):
        make_private(tmp_path / "theirs")
