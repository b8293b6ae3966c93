"""What pyproject.toml cannot say: the folders recipes/ and requirements/ are packaged inside `verl_ext`."""

from setuptools import find_namespace_packages, setup

DATA = ("recipes", "requirements")

packages = find_namespace_packages(include=["verl_ext*", "eval_pipeline*"])
packages += [f"verl_ext.{name}" for name in find_namespace_packages(include=[f"{each}*" for each in DATA])]
setup(packages=packages, package_dir={f"verl_ext.{name}": name for name in DATA})
