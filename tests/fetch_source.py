#!/usr/bin/env python3
"""Fetches the source package of a project from the package index that pip is set up for, without building it.

    fetch_source.py PROJECT FILE
"""
import os
import sys

from pip._internal.index.collector import LinkCollector
from pip._internal.index.package_finder import PackageFinder
from pip._internal.commands import create_command
from pip._internal.models.selection_prefs import SelectionPreferences

project, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args([])
session = command._build_session(options)
finder = PackageFinder.create(link_collector=LinkCollector.create(session, options),
                              selection_prefs=SelectionPreferences(allow_yanked=False))
sources = [c for c in finder.find_all_candidates(project) if not c.link.is_wheel]
newest = max(sources, key=lambda c: c.version)
answer = session.get(newest.link.url_without_fragment, stream=True)
answer.raise_for_status()
with open(target + ".part", "wb") as file:
    for piece in answer.iter_content(1 << 20):
        file.write(piece)
os.replace(target + ".part", target)
print(newest.link.filename)
