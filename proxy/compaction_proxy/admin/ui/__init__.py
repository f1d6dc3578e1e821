"""The admin pages: show what compaction has done, in a browser.

The pages use the same queries and commands as the admin API, so their figures are the same. The server
renders every page; scripts only draw charts and refresh lists, and no page needs them.
"""
