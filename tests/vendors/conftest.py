"""Vendors' own tests run where the vendor is installed: tests/kit/test_vendor.py does that."""

collect_ignore_glob = ["*/tests/*"]
