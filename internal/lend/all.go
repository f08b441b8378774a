package lend

import "github.com/weirlimit/weir/limit"

// Part is one key's part of what TakeAll takes: Units, at least 1. TakeAll fills in the rest.
type Part[K, N comparable] struct {
	Key   K
	Units int64
	Terms *limit.Lent
	Left  int64 // of its loan

	loan *loan[K, N]
}

// TakeAll is Take of several keys, which may repeat: all of it is admitted, or nothing. Of what it takes and puts back no report tells in
// between, which could not be unsaid: neither spent units nor returned ones ever become fewer.
func (b *Book[K, N]) TakeAll(parts []Part[K, N], now func() int64) (ok bool) {
	if b.closed.Load() || len(parts) == 0 {
		return false
	}
	b.mu.Lock() // reports are made under it
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
