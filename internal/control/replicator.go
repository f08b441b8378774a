package control

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

const (
	notifyTimeout  = time.Second            // how long a change of an override waits for the other members
	compareTimeout = 10 * time.Second       // for one comparison of two books
	pace           = 250 * time.Millisecond // between two looks for members to compare books with
	// least time between two commits; if it is more, restFactor times what the last commit took
	commitPace = 100 * time.Millisecond
	restFactor = 4
	again      = 30 * time.Second       // books that were equal are compared again after this
	minDelay   = 500 * time.Millisecond // after a failed comparison, doubled each time
	maxDelay   = 15 * time.Second
	atOnce     = 16 // members that are asked in parallel
)

// Peers makes calls to other members.
type Peers interface {
	Notify(ctx context.Context, to ownership.Node, req *peerv1.NotifyOverridesRequest) (*peerv1.NotifyOverridesResponse,
		error)
	Pull(ctx context.Context, to ownership.Node, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse,
		error)
}

// ReplicatorConfig configures a Replicator. All fields are required.
type ReplicatorConfig struct {
	Self ownership.Node
	Book *Book
	// Members returns all members, this one included, in order of their names.
	Members func() []ownership.Node
	Peers   Peers
	// Apply puts the book into force. It is called after each change of the book, and never concurrently.
	Apply  func()
	Now    func() time.Time
	Logger *slog.Logger
}

// Replicator keeps a member's book equal to those of the other members. Its methods are safe for concurrent use.
type Replicator struct {
	peerv1.UnimplementedOverridesServer
	cfg ReplicatorConfig

	mu     sync.Mutex
	others map[ownership.Node]*other
	steps  []*pending // for the next commit

	turn   chan struct{}            // full while a commit is in progress
	resume time.Time                // the next commit may begin from then on
	force  atomic.Pointer[contents] // the contents of the book that Apply has put into force
}

// pending is a step that waits for a commit. Only the goroutine that has filled turn may use it.
type pending struct {
	Step
	done bool
}

// other is the state of the comparison with another member's book.
type other struct {
	pull  chan struct{} // full while the other book is being pulled
	met   bool          // books were compared at least once
	equal Digest        // the digest of both books when they were last found equal
	delay time.Duration // after the last attempt if it failed; 0: it succeeded
	due   time.Time     // of the next attempt, unless the book changes before
}

// NewReplicator returns the Replicator of a member that starts. The caller must call Run.
func NewReplicator(cfg ReplicatorConfig) *Replicator {
	r := &Replicator{cfg: cfg, turn: make(chan struct{}, 1), others: make(map[ownership.Node]*other)}
	r.force.Store(cfg.Book.now.Load())
	return r
}

// other returns the state of a member. The caller must hold mu.
func (r *Replicator) other(m ownership.Node) *other {
	o := r.others[m]
	if o == nil {
		o = &other{pull: make(chan struct{}, 1)}
		r.others[m] = o
	}
	return o
}

// found notes the result of the last attempt with a member.
func (r *Replicator) found(m ownership.Node, theirs Digest, err error) {
	own := r.cfg.Book.Digest()
	r.mu.Lock()
	defer r.mu.Unlock()
	o, now := r.other(m), r.cfg.Now()
	if err == nil && theirs == own {
		o.met, o.equal, o.delay, o.due = true, own, 0, now.Add(again)
		return
	}
	o.met = o.met || err == nil
	o.delay = min(max(2*o.delay, minDelay), maxDelay)
	o.due = now.Add(o.delay)
}

// Met reports whether this member's book has been compared with that of every other member since both started.
func (r *Replicator) Met() bool { return r.Unequal(true) == 0 }

// awaitMet waits until Met, for notifyTimeout at most.
func (r *Replicator) awaitMet(ctx context.Context) (met bool) {
	ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	for !r.Met() {
		select {
		case <-time.After(commitPace / 4):
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// Unequal returns the number of other members whose books are not known to equal this one. With never, it returns the
// number of those that were never compared.
func (r *Replicator) Unequal(never bool) (n int) {
	own := r.cfg.Book.Digest()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.cfg.Members() {
		if o := r.others[m]; m != r.cfg.Self && (o == nil || !o.met || !never && o.equal != own) {
			n++
		}
	}
	return n
}

// Run compares books with the other members until ctx ends: after changes, with new members, and every 30 s.
func (r *Replicator) Run(ctx context.Context) {
	var retry time.Time // when a failed write is repeated
	for ctx.Err() == nil {
		var group panics.Group
		group.SetLimit(atOnce)
		for _, m := range r.due() {
			group.Go(func() { r.compare(ctx, m) })
		}
		group.Wait()
		if now := r.cfg.Now(); now.After(retry) {
			if err := r.cfg.Book.Retry(); err != nil {
				r.cfg.Logger.Error("overrides not written", "error", err)
				retry = now.Add(maxDelay)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(pace):
		}
	}
}

// due returns the members to compare books with now, and forgets those that are gone.
func (r *Replicator) due() (list []ownership.Node) {
	own, now, members := r.cfg.Book.Digest(), r.cfg.Now(), r.cfg.Members()
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.others, func(m ownership.Node, _ *other) bool { return !slices.Contains(members, m) })
	for _, m := range members {
		if o := r.other(m); m != r.cfg.Self && (!now.Before(o.due) || o.delay == 0 && o.equal != own) {
			list = append(list, m)
		}
	}
	return list
}

// commit has the book carry out a step, together with others that wait, and puts the book into force. Commits are rare,
// however many changes there are, because each one writes the file and compiles the policies, on every member.
func (r *Replicator) commit(step Step) *pending {
	p := &pending{Step: step}
	r.mu.Lock()
	r.steps = append(r.steps, p)
	r.mu.Unlock()
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	if p.done {
		return p // another goroutine has committed it
	}
	time.Sleep(r.resume.Sub(r.cfg.Now()))
	r.mu.Lock()
	all := r.steps
	r.steps = nil
	r.mu.Unlock()
	steps := make([]*Step, len(all))
	for i := range all {
		all[i].done = true
		steps[i] = &all[i].Step
	}
	began := r.cfg.Now()
	if r.cfg.Book.Commit(r.cfg.Self.Name, steps...) {
		r.cfg.Apply()
		r.force.Store(r.cfg.Book.now.Load())
		ended := r.cfg.Now()
		r.resume = ended.Add(max(commitPace, restFactor*ended.Sub(began)))
	}
	return p
}

// compare makes this member's book and another member's equal.
func (r *Replicator) compare(ctx context.Context, m ownership.Node) {
	ctx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	theirs, err := r.pull(ctx, m)
	digest := theirs.digest
	if err == nil && digest != r.force.Load().digest {
		_, digest, err = r.notify(ctx, m)
	}
	if err != nil {
		r.cfg.Logger.Debug("overrides not compared", "member", m.Name, "error", status.Convert(err).Message())
	}
	r.found(m, digest, err)
}

// notify has another member pull this member's book, and returns its answer and the digest of its book after that.
func (r *Replicator) notify(ctx context.Context, m ownership.Node) (*peerv1.NotifyOverridesResponse, Digest, error) {
	answer, err := r.cfg.Peers.Notify(ctx, m,
		&peerv1.NotifyOverridesRequest{Name: r.cfg.Self.Name, Boot: r.cfg.Self.Boot})
	if err != nil {
		return nil, Digest{}, err
	}
	digest, err := digestOf(answer.Digest)
	return answer, digest, err
}

// book is another member's book.
type book struct {
	digest  Digest
	entries []Entry // nil if it equals this member's
	left    error   // why some of them were left out
}

// pull takes in another member's book.
func (r *Replicator) pull(ctx context.Context, m ownership.Node) (theirs book, err error) {
	r.mu.Lock()
	o := r.other(m)
	r.mu.Unlock()
	o.pull <- struct{}{} // a later pull finds what this one has taken
	defer func() { <-o.pull }()
	own := r.force.Load().digest
	answer, err := r.cfg.Peers.Pull(ctx, m, &peerv1.PullOverridesRequest{Digest: own[:]})
	if err != nil {
		return theirs, err
	}
	if theirs.digest, err = digestOf(answer.Digest); err != nil || theirs.digest == own {
		return theirs, err
	}
	if theirs.entries, err = parse("book of "+m.Name, answer.Book); err != nil {
		return theirs, err
	}
	step := r.commit(Step{Merge: theirs.entries}).Step
	if theirs.left = step.Err; theirs.left != nil {
		r.cfg.Logger.Warn("overrides of another member not taken", "member", m.Name, "error", theirs.left)
	}
	if n := len(step.Taken); n > 0 {
		newest := slices.MaxFunc(step.Taken, func(a, b Entry) int { return cmp.Compare(a.Counter, b.Counter) })
		r.cfg.Logger.Info("overrides of another member taken", "member", m.Name, "overrides", n, "newest",
			newest.Version.String(),
			"policy", newest.Policy, "settings", newest.Settings, "caller", newest.By)
	}
	return theirs, nil
}

func digestOf(b []byte) (d Digest, err error) {
	if len(b) != len(d) {
		return d, fmt.Errorf("the digest has %d bytes", len(b))
	}
	return Digest(b), nil
}

// spread tells all other members of a change by this one, and returns where it is in force.
func (r *Replicator) spread(ctx context.Context, e *Entry) []*weirv1.OverrideMember {
	// The change is made, whether or not the caller still waits.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), notifyTimeout)
	defer cancel()
	members := r.cfg.Members()
	all := make([]*weirv1.OverrideMember, len(members))
	var group panics.Group
	group.SetLimit(4 * atOnce)
	for i, m := range members {
		out := &weirv1.OverrideMember{Name: m.Name}
		if all[i] = out; m != r.cfg.Self {
			group.Go(func() { r.tell(ctx, m, e, out) })
		}
	}
	group.Wait()
	now := r.force.Load().entries[e.ID]
	for i, m := range members {
		// A change that lost against another one ends on all members that still have it.
		if m == r.cfg.Self || now != nil && now.newer(e) {
			stand(all[i], e, now)
			all[i].Durable = all[i].Has && r.cfg.Book.Durable()
		}
	}
	return all
}

// tell tells another member of a change, and sets out to the result.
func (r *Replicator) tell(ctx context.Context, m ownership.Node, e *Entry, out *weirv1.OverrideMember) {
	answer, digest, err := r.notify(ctx, m)
	r.found(m, digest, err)
	own := r.force.Load()
	there := own.entries[e.ID]
	if err == nil && digest != own.digest {
		var theirs book
		if theirs, err = r.pull(ctx, m); err == nil && theirs.entries != nil {
			there = nil
			if i := slices.IndexFunc(theirs.entries, func(t Entry) bool { return t.ID == e.ID }); i >= 0 {
				there = &theirs.entries[i]
			}
		} else { // the books have become equal meanwhile
			there = r.force.Load().entries[e.ID]
		}
	}
	if err != nil {
		out.Error = status.Convert(err).Message()
		return
	}
	stand(out, e, there)
	out.Durable = out.Has && answer.Durable
	out.Error = cmp.Or(out.Error, answer.Error)
}

// stand sets out for a member that has the entry there for the override of the change e.
func stand(out *weirv1.OverrideMember, e, there *Entry) {
	out.Has = there == nil && e.Deleted() || there != nil && *there == *e
	if there != nil && there.newer(e) {
		out.Error = "another change of the override is in force: " + there.Version.String()
	}
}

// Notify implements peerv1.OverridesServer. It believes nothing that the request says: it pulls from the member.
func (r *Replicator) Notify(ctx context.Context,
	req *peerv1.NotifyOverridesRequest) (*peerv1.NotifyOverridesResponse, error) {
	from := ownership.Node{Name: req.GetName(), Boot: req.GetBoot()}
	if from == r.cfg.Self || !slices.Contains(r.cfg.Members(), from) {
		return nil, status.Error(codes.FailedPrecondition, "this node does not see the sender as another member")
	}
	ctx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	theirs, err := r.pull(ctx, from)
	if err != nil {
		return nil, err
	}
	st, digest := r.cfg.Book.Stats(), r.force.Load().digest
	r.found(from, theirs.digest, nil)
	out := &peerv1.NotifyOverridesResponse{Digest: digest[:], Durable: st.Durable}
	if wrong := cmp.Or(theirs.left, st.WriteError); wrong != nil {
		out.Error = wrong.Error()
	}
	return out, nil
}

// Pull implements peerv1.OverridesServer.
func (r *Replicator) Pull(_ context.Context, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	own := r.force.Load()
	out := &peerv1.PullOverridesResponse{Digest: own.digest[:]}
	if !slices.Equal(req.Digest, own.digest[:]) {
		out.Book = own.text
	}
	return out, nil
}
