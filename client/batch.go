package client

import (
	"context"
	"errors"

	"github.com/weirlimit/weir/internal/lend"
)

// batchKey is the key that a question of a batch may be on loan by, and false where it is not answered from loans: what is asked under an
// id is answered by who remembers that, and limits sent along have handles.
func (q *question) batchKey() (loanKey, bool) {
	return loanKey{policy: q.Policy, key: q.Key}, q.Limit == nil && q.cost > 0 && q.requestID == ""
}

// checkBatch answers questions one by one, from loans those that are covered, and has nodes decide about the others. After a question that a node
// is asked, those about the same key are, too: they are decided in their order. The caller is counted in.
func (c *Client) checkBatch(ctx context.Context, qs []question) ([]Result, error) {
	if c.loans == nil {
		return c.decide(ctx, qs)
	}
	b := c.loans.book
	results := make([]Result, len(qs))
	var rest []question
	var places []int
	var asked map[loanKey]struct{} // of the keys that are on loan
	lent := b.Loans() > 0
	for i := range qs {
		q := &qs[i]
		key, may := q.batchKey()
		if lent && q.Limit == nil {
			_, before := asked[key]
			if may && !before {
				if t, left, ok := b.Take(key, q.cost, c.loans.clock); ok {
					results[i].Policy = q.Policy
					t.Admit(&results[i].Decision, q.cost, left)
					c.memory.borrowed(&q.target, q.Key)
					continue
				}
			}
			if !before && b.Has(key) {
				if asked == nil {
					asked = make(map[loanKey]struct{})
				}
				asked[key] = struct{}{}
			}
		}
		rest, places = append(rest, *q), append(places, i)
	}
	if len(rest) == 0 {
		return results, nil
	}
	got, err := c.decide(ctx, rest)
	if err != nil && (len(rest) == len(qs) || ctx.Err() != nil || errors.Is(err, ErrClosed)) {
		return nil, err
	}
	for j, i := range places {
		if err != nil {
			results[i].Err = err // not one of those that nodes were asked could be decided
			continue
		}
		results[i] = got[j]
		if key, may := qs[i].batchKey(); may && got[j].Err == nil {
			c.loans.missed(key, qs[i].cost, &got[j].Decision)
		}
	}
	return results, nil
}

// allBorrowed answers questions that are one from loans, if these cover all of them, and reports whether it did.
func (c *Client) allBorrowed(qs []question, all *AllDecision) bool {
	if c.loans == nil || c.loans.book.Loans() == 0 {
		return false
	}
	b := c.loans.book
	parts := make([]lend.Part[loanKey, *member], len(qs))
	for i := range qs {
		key, may := qs[i].batchKey()
		if !may || !b.Has(key) {
			return false
		}
		parts[i] = lend.Part[loanKey, *member]{Key: key, Units: qs[i].cost}
	}
	if !b.TakeAll(parts, c.loans.clock) {
		return false
	}
	all.Allowed = true
	all.Decisions = make([]Decision, len(qs))
	for i := range parts {
		p, d := &parts[i], &all.Decisions[i]
		d.Policy = qs[i].Policy
		p.Terms.Admit(d, p.Units, p.Left)
		c.memory.borrowed(&qs[i].target, qs[i].Key)
	}
	return true
}

// allAdmitted is told of questions that are one which nodes have admitted.
func (c *Client) allAdmitted(qs []question, all *AllDecision) {
	if c.loans == nil || !all.Allowed {
		return
	}
	for i := range qs {
		if key, may := qs[i].batchKey(); may && i < len(all.Decisions) {
			c.loans.missed(key, qs[i].cost, &all.Decisions[i])
		}
	}
}
