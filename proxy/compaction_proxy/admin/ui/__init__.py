"""The admin pages: show what compaction has done, in a browser.

The pages are a client of the admin API in the same process. A page shows exactly what the API returns, so
its figures cannot differ from the API's. The server renders every page; scripts only draw charts and refresh
lists, and no page needs them.
"""
