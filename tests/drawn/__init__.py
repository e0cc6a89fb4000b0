"""Random tiny models of many architectures, merged and compared with what torch makes of them."""
