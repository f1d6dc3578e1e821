"""Serves the admin pages, which show in a browser what compactions have done and saved.

The pages use the same queries and commands as the admin API, so their figures are the same. The server
renders every page. Scripts only draw charts and refresh lists, and every page works without scripts.
"""
