# SPDX-License-Identifier: BSD-3-Clause
"""Takes the steps of the Dockerfile in roots that debootstrap makes, where there is no engine, and
tries the wheel in one.

dockerfile.py   reads the Dockerfile and .dockerignore
root.py         a root of Debian, and processes confined to it
builder.py      takes the steps of each stage, in a root of its own
pods.py         what the example for Kubernetes starts
try             all of it, and then the jobs that a user starts in the image
wheel_trial.py  tools/wheel/try --debian
"""
