"""Values that all of ray_dcp shares: boxes, columns, checksums, dtypes. Pure."""
