"""Programs for working on this repository; no part of the installed package."""
