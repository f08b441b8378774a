package overrides

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/recovered"
	"github.com/weirlimit/weir/internal/wake"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

const (
	pushTimeout     = time.Second            // how long who changes an override waits for the other members
	exchangeTimeout = 10 * time.Second       // for all pages of two members
	pace            = 250 * time.Millisecond // from a change until books are compared: until then it has come directly, as a rule
	again           = 30 * time.Second       // after which books that were equal are compared again
	minDelay        = 500 * time.Millisecond // from a comparison that failed until the next one with this member, doubled each time
	maxDelay        = 15 * time.Second
	atOnce          = 16      // members that are asked at a time
	pageBytes       = 1 << 20 // of a message with entries, about
	maxPages        = 1 << 10 // of one book: more than it can have
)

// Peers asks other members.
type Peers interface {
	Push(ctx context.Context, to ownership.Node, req *peerv1.PushOverridesRequest) (*peerv1.PushOverridesResponse, error)
	Pull(ctx context.Context, to ownership.Node, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error)
}

// ReplicatorConfig says whose book is kept like those of others. All fields are required.
type ReplicatorConfig struct {
	Self ownership.Node
	Book *Book
	// Members returns all members, this one included, in order of their names, and what is closed when that changes; nil: it never does.
	Members func() ([]ownership.Node, <-chan struct{})
	Peers   Peers
	// Apply puts the book into force. It is called after each change of it, by several goroutines.
	Apply  func()
	Now    func() time.Time
	Logger *slog.Logger
}

// Replicator keeps a member's book like those of the others. Its methods are safe for concurrent use.
type Replicator struct {
	peerv1.UnimplementedOverridesServer
	cfg  ReplicatorConfig
	kick wake.Signal // set when the book has changed

	mu     sync.Mutex
	others map[ownership.Node]*other
}

// other is what is known of another member's book.
type other struct {
	met   bool   // books were exchanged at least once
	equal Digest // of both books, when they were last found equal
	at    time.Time
	delay time.Duration // after the last attempt, which failed; 0: it did not
	due   time.Time     // of the next attempt then
}

// NewReplicator returns the Replicator of a member that starts; Run is what it lives by.
func NewReplicator(cfg ReplicatorConfig) *Replicator {
	return &Replicator{cfg: cfg, kick: wake.New(), others: make(map[ownership.Node]*other)}
}

// other returns what is known of a member, for a holder of mu.
func (r *Replicator) other(m ownership.Node) *other {
	o := r.others[m]
	if o == nil {
		o = new(other)
		r.others[m] = o
	}
	return o
}

// found notes how the last attempt with a member has ended.
func (r *Replicator) found(m ownership.Node, theirs []byte, err error) {
	own := r.cfg.Book.Digest()
	r.mu.Lock()
	defer r.mu.Unlock()
	o, now := r.other(m), r.cfg.Now()
	if err == nil && slices.Equal(theirs, own[:]) {
		*o = other{met: true, equal: own, at: now}
		return
	}
	o.met = o.met || err == nil
	o.delay = min(max(2*o.delay, minDelay), maxDelay)
	o.due = now.Add(o.delay)
}

// Met reports whether this member's book has been exchanged with that of every other member since these began.
func (r *Replicator) Met() bool { return r.Unequal(true) == 0 }

// Unequal is the number of other members whose books are not known to equal this one; with never, of those with which none was exchanged.
func (r *Replicator) Unequal(never bool) (n int) {
	members, _ := r.cfg.Members()
	own := r.cfg.Book.Digest()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range members {
		if o := r.others[m]; m != r.cfg.Self && (o == nil || !o.met || !never && o.equal != own) {
			n++
		}
	}
	return n
}

// Run compares books with the other members until ctx ends: after changes, with members that come, and now and then.
func (r *Replicator) Run(ctx context.Context) {
	for {
		members, replaced := r.cfg.Members()
		r.retain(members)
		var group recovered.Group
		group.SetLimit(atOnce)
		due, next := r.due(members)
		for _, m := range due {
			group.Go(func() { r.exchange(ctx, m) })
		}
		group.Wait()
		if len(due) > 0 {
			_, next = r.due(members)
		}
		if err := r.cfg.Book.Retry(); err != nil {
			r.cfg.Logger.Error("overrides not written", "error", err)
			next = min(next, maxDelay)
		}
		select {
		case <-ctx.Done():
			return
		case <-replaced:
		case <-r.kick:
			select {
			case <-time.After(pace):
			case <-ctx.Done():
				return
			}
		case <-time.After(max(next, pace)):
		}
	}
}

// retain forgets members that are gone.
func (r *Replicator) retain(members []ownership.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for m := range r.others {
		if !slices.Contains(members, m) {
			delete(r.others, m)
		}
	}
}

// due returns the members to compare books with, and how long from now the next one is due.
func (r *Replicator) due(members []ownership.Node) (now []ownership.Node, next time.Duration) {
	own, t := r.cfg.Book.Digest(), r.cfg.Now()
	next = again
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range members {
		if m == r.cfg.Self {
			continue
		}
		o := r.other(m)
		var wait time.Duration
		switch {
		case o.delay > 0:
			wait = o.due.Sub(t)
		case o.met && o.equal == own:
			wait = o.at.Add(again).Sub(t)
		}
		if wait <= 0 {
			now = append(now, m)
		}
		next = min(next, max(wait, 0))
	}
	return now, next
}

// changed puts a changed book into force, and has it compared with the others' soon.
func (r *Replicator) changed() {
	r.cfg.Apply()
	r.kick.Set()
}

// exchange makes this member's book and another's the same.
func (r *Replicator) exchange(ctx context.Context, m ownership.Node) {
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	theirs, digest, err := r.pull(ctx, m)
	if err == nil {
		var missing []*Entry
		if own := r.cfg.Book.Digest(); !slices.Equal(digest, own[:]) {
			for _, e := range r.cfg.Book.sorted() {
				if has := theirs[e.ID]; has == nil || e.newer(has) {
					missing = append(missing, e)
				}
			}
		}
		for page := range pages(missing) {
			var answer *peerv1.PushOverridesResponse
			if answer, err = r.cfg.Peers.Push(ctx, m, &peerv1.PushOverridesRequest{Entries: page}); err != nil {
				break
			}
			digest = answer.Digest
		}
	}
	if err != nil {
		r.cfg.Logger.Debug("overrides not exchanged", "member", m.Name, "error", status.Convert(err).Message())
	}
	r.found(m, digest, err)
}

// pull takes in another member's entries, unless they are the same, and returns them and their digest.
func (r *Replicator) pull(ctx context.Context, m ownership.Node) (map[ID]*Entry, []byte, error) {
	theirs, changes := make(map[ID]*Entry), 0
	defer func() {
		if changes > 0 {
			r.changed()
		}
	}()
	own := r.cfg.Book.Digest()
	req, last := &peerv1.PullOverridesRequest{Digest: own[:]}, ID{}
	for range maxPages {
		answer, err := r.cfg.Peers.Pull(ctx, m, req)
		if err != nil {
			return nil, nil, err
		}
		if len(answer.Digest) != len(own) {
			return nil, nil, fmt.Errorf("the digest has %d bytes", len(answer.Digest))
		}
		page := entriesOf(answer.Entries)
		n, err := r.cfg.Book.Merge(page)
		changes += n
		r.refused(m.Name, err)
		for i := range page {
			if page[i].Compare(last) <= 0 {
				return nil, nil, errors.New("the pages are not in order")
			}
			last = page[i].ID
			theirs[last] = &page[i]
		}
		if !answer.More || len(page) == 0 {
			return theirs, answer.Digest, nil
		}
		req = &peerv1.PullOverridesRequest{Digest: own[:], After: &peerv1.OverrideEntry{Policy: last.Policy, Key: last.Key, Prefix: last.Prefix}}
	}
	return nil, nil, errors.New("there are too many pages")
}

// refused reports entries of another member that were not taken in.
func (r *Replicator) refused(member string, err error) {
	if err != nil {
		r.cfg.Logger.Warn("overrides of another member not taken", "member", member, "error", err)
	}
}

// spread sends a change of this member to all others, and says who has it.
func (r *Replicator) spread(ctx context.Context, e *Entry) []*weirv1.OverrideMember {
	// The change is made, whether or not the caller still waits.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pushTimeout)
	defer cancel()
	members, _ := r.cfg.Members()
	all := make([]*weirv1.OverrideMember, len(members))
	var group recovered.Group
	group.SetLimit(4 * atOnce)
	for i, m := range members {
		out := &weirv1.OverrideMember{Name: m.Name}
		all[i] = out
		if m == r.cfg.Self {
			out.Has, out.Durable = true, r.cfg.Book.Durable()
			continue
		}
		group.Go(func() {
			answer, err := r.cfg.Peers.Push(ctx, m, &peerv1.PushOverridesRequest{Entries: []*peerv1.OverrideEntry{protoEntry(e)}})
			if err != nil {
				out.Error = status.Convert(err).Message()
			} else {
				out.Has, out.Durable, out.Error = answer.Error == "", answer.Durable && answer.Error == "", cmp.Or(answer.Error, answer.WriteError)
			}
			r.found(m, answer.GetDigest(), err)
		})
	}
	group.Wait()
	return all
}

// Push implements peerv1.OverridesServer.
func (r *Replicator) Push(_ context.Context, req *peerv1.PushOverridesRequest) (*peerv1.PushOverridesResponse, error) {
	n, err := r.cfg.Book.Merge(entriesOf(req.Entries))
	if n > 0 {
		r.changed()
	}
	r.refused("", err)
	st, digest := r.cfg.Book.Stats(), r.cfg.Book.Digest()
	out := &peerv1.PushOverridesResponse{Digest: digest[:], Durable: st.Durable}
	if err != nil {
		out.Error = err.Error()
	}
	if st.WriteError != nil {
		out.WriteError = st.WriteError.Error()
	}
	return out, nil
}

// Pull implements peerv1.OverridesServer.
func (r *Replicator) Pull(_ context.Context, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	digest := r.cfg.Book.Digest()
	out := &peerv1.PullOverridesResponse{Digest: digest[:]}
	if slices.Equal(req.Digest, digest[:]) {
		return out, nil
	}
	after := req.GetAfter()
	rest := r.cfg.Book.after(ID{after.GetPolicy(), after.GetKey(), after.GetPrefix()})
	for page := range pages(rest) {
		out.Entries, out.More = page, len(page) < len(rest)
		break
	}
	return out, nil
}

// pages divides entries among messages.
func pages(entries []*Entry) func(yield func([]*peerv1.OverrideEntry) bool) {
	return func(yield func([]*peerv1.OverrideEntry) bool) {
		for len(entries) > 0 {
			var page []*peerv1.OverrideEntry
			size := 0
			for len(entries) > 0 && (size < pageBytes || len(page) == 0) {
				size += entries[0].bytes()
				page, entries = append(page, protoEntry(entries[0])), entries[1:]
			}
			if !yield(page) {
				return
			}
		}
	}
}

func protoEntry(e *Entry) *peerv1.OverrideEntry {
	return &peerv1.OverrideEntry{
		Policy: e.Policy, Key: e.Key, Prefix: e.Prefix, Counter: e.Counter, Node: e.Node, Settings: e.Settings, By: e.By, AtUnixMs: e.At.UnixMilli(),
	}
}

func entriesOf(list []*peerv1.OverrideEntry) []Entry {
	out := make([]Entry, len(list))
	for i, e := range list {
		out[i] = Entry{
			ID: ID{e.GetPolicy(), e.GetKey(), e.GetPrefix()}, Version: Version{e.GetCounter(), e.GetNode()}, Settings: e.GetSettings(), By: e.GetBy(),
			At: time.UnixMilli(e.GetAtUnixMs()).UTC(),
		}
	}
	return out
}
