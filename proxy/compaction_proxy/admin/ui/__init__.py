"""The pages: what compaction has done, for people with a browser.

They are a client of the admin API, in the same process: what a page shows is what the API answers, so figures
cannot differ. Every page is rendered here; scripts draw charts and refresh lists, and nothing needs them.
"""
