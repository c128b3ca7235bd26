# SPDX-License-Identifier: BSD-3-Clause
"""The parts of tools/third_party: libraries.py is the table of what muster is linked with, tree.py
holds it against the source tree, debian.py and torch_wheel.py read licences from packages,
wheel.py looks for them in a wheel.
"""
