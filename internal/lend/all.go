package lend

import "github.com/weirlimit/weir/limit"

// Part is one key's part of a TakeAll: the caller sets Key and Units (at least 1), TakeAll sets Terms and Left.
type Part[K, N comparable] struct {
	Key   K
	Units int64
	Terms *limit.Lent
	Left  int64 // units left of the key's loan

	loan *loan[K, N]
}

// TakeAll is Take for several keys, which may repeat: it admits all parts or none. It holds the lock under which
// reports are made, so that no report counts units as spent that TakeAll puts back: spent and returned must never fall.
func (b *Book[K, N]) TakeAll(parts []Part[K, N], now func() int64) (ok bool) {
	if b.closed.Load() || len(parts) == 0 {
		return false
	}
	b.mu.Lock() // Report takes it too
	defer b.mu.Unlock()
	loans := *b.loans.Load()
	taken := 0
	defer func() {
		if !ok {
			for i := range parts[:taken] {
				parts[i].loan.untake(parts[i].Units)
			}
		}
	}()
	for i := range parts {
		p := &parts[i]
		if p.loan = loans[p.Key]; p.loan == nil {
			return false
		}
		if p.Left, ok = p.loan.take(p.Units); !ok {
			return false
		}
		taken++
	}
	at := now()
	for i := range parts {
		if at >= parts[i].loan.deadline.Load() {
			return false
		}
	}
	for i := range parts {
		p := &parts[i]
		p.Terms = b.admit(p.loan, p.Left)
	}
	return true
}
