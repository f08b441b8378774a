// Package control has what operators change in a running cluster, the same on all members: the overrides of limits, and
// the keys that encrypt gossip. It also makes the secrets that a cluster begins with.
//
// A [Book] has one member's overrides, with a version each. Members that take each other's books, in any order and any
// number of times, end up with the same book. A member's own change is in force only once its file has it. A
// [Replicator] tells the other members of changes, and compares books with them until all are equal. [Overrides] is the
// service for operators. What an override means is decided by package policy.
//
// The path of a change: Overrides → Replicator.commit → Book.Commit, which writes the file → ReplicatorConfig.Apply,
// which puts the book into force → Replicator.spread, which has the other members pull it.
//
// When the operator is answered, some members may not have the override yet; the answer says which ones have it. Of two
// concurrent changes of one override, the later version wins on all members, and the answer to the other change says
// so. A deleted override can come back with a member that was away while MaxDeleted other overrides were deleted.
package control

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
)

// Bounds of a Book. A change by an operator is rejected beyond MaxOverrides and MaxBytes, or if the policy would then
// have more than is left free, so that no policy takes all. Entries of other members are taken up to twice as much,
// because the two sides of a split cluster may both have been filled.
const (
	MaxOverrides = 10_000
	MaxBytes     = 2 << 20 // in the book's file
	// MaxDeleted and MaxDeletedBytes bound the deletions that are remembered. Beyond that the oldest are forgotten.
	MaxDeleted      = 10_000
	MaxDeletedBytes = 2 << 20
)

const (
	maxCounter = 1 << 53 // of a Version; a JSON number is exact up to here
	// maxStep is how far the counter of another member's entry may be above all counters in the book; an empty book has
	// 0. No cluster makes so many changes, and a member that lies would need days of changes to use up the counters.
	maxStep    = 1 << 32
	maxName    = 128 // bytes of a member's or a caller's name
	entryBytes = 128 // the most that an entry takes of a file besides its texts
)

// ID identifies an override: the policy, and a key or the keys that begin with Prefix.
type ID struct{ Policy, Key, Prefix string }

// Compare orders IDs by policy, and within a policy keys before prefixes.
func (id ID) Compare(other ID) int {
	return cmp.Or(strings.Compare(id.Policy, other.Policy), strings.Compare(id.Prefix, other.Prefix),
		strings.Compare(id.Key, other.Key))
}

// Version orders the changes of an override. Counter is a Lamport clock (Lamport, 1978): it is above the counter of
// every entry that the node knew when it made the change. Node is that node's name.
type Version struct {
	Counter uint64
	Node    string
}

// String returns the version in the form that operators see: "12@node-a".
func (v Version) String() string { return fmt.Sprintf("%d@%s", v.Counter, v.Node) }

// Entry is the last change of an override.
type Entry struct {
	ID
	Version
	Settings string    // see policy.Override; empty: the override was deleted
	By       string    // the caller who changed it, by the name in the access file
	At       time.Time // when, by the clock of the node that was asked; nothing is decided by it
}

// Deleted reports whether the entry is a deletion.
func (e *Entry) Deleted() bool { return e.Settings == "" }

// Override returns an entry that is not Deleted in the form of package policy.
func (e *Entry) Override() policy.Override {
	return policy.Override{Policy: e.Policy, Key: e.Key, Prefix: e.Prefix, Settings: e.Settings}
}

// newer orders entries of one ID. A member that has lost its file may use a counter twice. Then the rest of the entry
// decides, the same on all members: a deletion, which has no settings, is the newest.
func (e *Entry) newer(other *Entry) bool {
	return cmp.Or(cmp.Compare(e.Counter, other.Counter), strings.Compare(e.Node, other.Node),
		strings.Compare(other.Settings, e.Settings),
		strings.Compare(e.By, other.By), e.At.Compare(other.At)) > 0
}

// bytes returns the most that the entry can take of a file.
func (e *Entry) bytes() int {
	n := entryBytes + len(e.Settings)
	for _, text := range []string{e.Policy, e.Key, e.Prefix, e.Node, e.By} {
		n += len(text)
		for i := range len(text) {
			if c := text[i]; c < ' ' || c == '"' || c == '\\' {
				n += len(`\u0000`) - 1
			}
		}
	}
	return n
}

// valid returns what is wrong with an entry of a file or of another member; the error names the field. It does not
// check Settings, because another member may have other policies.
func (e *Entry) valid() error {
	o := e.Override()
	if err := o.Valid(); err != nil {
		return err
	}
	for _, name := range []struct{ field, text string }{{"node", e.Node}, {"by", e.By}} {
		if len(name.text) > maxName || !utf8.ValidString(name.text) {
			return limit.NewError(limit.Invalid, name.field, "is not a name of at most 128 bytes of UTF-8")
		}
	}
	switch {
	case e.Node == "":
		return limit.NewError(limit.Invalid, "node", "is missing")
	case e.Counter == 0 || e.Counter > maxCounter:
		return limit.NewError(limit.Invalid, "counter", "is not a number from 1 to 2^53")
	case !utf8.ValidString(e.Settings):
		return limit.NewError(limit.Invalid, "settings", "are not valid UTF-8")
	case e.At.UnixMilli() < 0 || e.At.UnixMilli() > maxMillis:
		return limit.NewError(limit.Invalid, "at", "is not a time from 1970 to 9999")
	}
	return nil
}

// inMillis returns a time with the precision that members exchange.
func inMillis(t time.Time) time.Time { return time.UnixMilli(t.UnixMilli()).UTC() }

// maxMillis is the end of the year 9999 in milliseconds since 1970: RFC 3339 has no later time.
const maxMillis = 253402300799999

// Digest is the SHA-256 of a Book's file: members with equal digests have the same entries.
type Digest [sha256.Size]byte

// Book has one member's overrides. Its methods are safe for concurrent use.
type Book struct {
	file *reload.Replacer // nil: entries are lost with the process

	change sync.Mutex // held while a change is written
	now    atomic.Pointer[contents]

	writes, writesFailed atomic.Uint64
}

// contents are a book's entries, and the state of its file. The contents of a Book are sealed and never change: a
// changed clone replaces them.
type contents struct {
	entries       map[ID]*Entry
	live, deleted sums
	counter       uint64 // the highest of all entries

	sorted []*Entry
	text   []byte // the file of these entries
	digest Digest
	failed error // why the file lacks entries of other members that are in force; nil: it has all
}

// OpenBook returns the book in a file, which the first change creates. If name is empty, the book has no file. If the
// file is not a book, the error says where it is wrong.
func OpenBook(name string) (*Book, error) {
	b, all := new(Book), &contents{entries: make(map[ID]*Entry)}
	if name != "" {
		b.file = &reload.Replacer{Name: name}
		entries, err := load(name)
		if err != nil {
			return nil, err
		}
		for i := range entries {
			all.put(&entries[i])
		}
	}
	b.now.Store(all)
	return b, all.seal()
}

// sums has the number and bytes of overrides, or of deletions.
type sums struct{ entries, bytes int }

// put adds an entry, in place of an earlier one of its ID.
func (c *contents) put(e *Entry) {
	c.remove(e.ID)
	c.entries[e.ID] = e
	c.count(e, 1)
	c.counter = max(c.counter, e.Counter)
}

func (c *contents) remove(id ID) {
	if was := c.entries[id]; was != nil {
		delete(c.entries, id)
		c.count(was, -1)
	}
}

// count adds an entry to the sums (sign 1), or subtracts it (-1).
func (c *contents) count(e *Entry, sign int) {
	of := &c.live
	if e.Deleted() {
		of = &c.deleted
	}
	of.entries += sign
	of.bytes += sign * e.bytes()
}

// clone returns a copy for a change.
func (c *contents) clone() *contents {
	out := *c
	out.entries = maps.Clone(c.entries)
	return &out
}

// forget drops the oldest deletions beyond the bounds. Members with the same entries drop the same ones.
func (c *contents) forget() {
	if c.deleted.entries <= MaxDeleted && c.deleted.bytes <= MaxDeletedBytes {
		return
	}
	var dead []*Entry
	for _, e := range c.entries {
		if e.Deleted() {
			dead = append(dead, e)
		}
	}
	slices.SortFunc(dead, func(a, b *Entry) int { // the newest first
		return cmp.Or(cmp.Compare(b.Counter, a.Counter), strings.Compare(b.Node, a.Node), b.Compare(a.ID))
	})
	// The first ones are kept, whatever follows them, so that the order in which members learn of deletions does not
	// matter.
	kept := 0
	for i, e := range dead {
		if kept += e.bytes(); i >= MaxDeleted || kept > MaxDeletedBytes {
			c.remove(e.ID)
		}
	}
}

// seal drops deletions beyond the bounds, and sets sorted, text and digest.
func (c *contents) seal() (err error) {
	c.forget()
	c.sorted = slices.SortedFunc(maps.Values(c.entries), func(a, b *Entry) int { return a.Compare(b.ID) })
	c.text, err = encode(c.sorted)
	c.digest = sha256.Sum256(c.text)
	return err
}

// The error for more overrides than a Book takes wraps ErrFull.
var ErrFull = errors.New("the overrides are full")

// Step is one part of a Commit: a change by this member, or the entries of another member.
type Step struct {
	Merge  []Entry // entries of another member
	Taken  []Entry // set by Commit: the entries of Merge that were newer than the book's own
	Change *Entry  // a change by this member, without a version; Commit sets it
	// Before is set by Commit: the override before Change; nil: there was none. To delete an override that does not
	// exist changes nothing and gives no version.
	Before *Entry
	// Err is set by Commit: why Change was not made, or why the first of the entries in Merge that were left out was.
	Err error
}

// Commit carries out steps together, and writes the file once. Entries of other members that are newer than the book's
// own are in force even if the file cannot be written: see Durable. A change is not made if the file cannot be written.
// changed reports whether the book has changed.
func (b *Book) Commit(node string, steps ...*Step) (changed bool) {
	b.change.Lock()
	defer b.change.Unlock()
	was := b.now.Load()
	next := was.clone()
	for _, s := range steps {
		next.merge(s, was.counter)
	}
	merged := next.clone()
	for _, s := range steps {
		if s.Change != nil {
			s.Err = next.change(s, node)
		}
	}
	err := next.seal()
	if err == nil && next.digest == was.digest {
		return false
	}
	if err == nil {
		err = b.write(next.text)
	}
	if err != nil {
		for _, s := range steps {
			if s.Change != nil {
				s.Err = cmp.Or(s.Err, err)
			}
		}
		next = merged   // Retry writes it again: the file may have the changes
		_ = next.seal() // cannot fail: all entries were encoded before, by this member or another
	}
	next.failed = err
	b.now.Store(next)
	return next.digest != was.digest
}

// change carries out the Change of a step.
func (c *contents) change(s *Step, node string) error {
	had, live := c.entries[s.Change.ID], c.live
	before := had
	if had != nil && had.Deleted() {
		before = nil
	}
	if s.Change.Deleted() && before == nil {
		return nil
	}
	if c.counter >= maxCounter {
		return errors.New("the version numbers are used up: remove overrides.json of all members while none runs")
	}
	e := *s.Change
	e.Version, e.At = Version{c.counter + 1, node}, inMillis(e.At)
	if err := e.valid(); err != nil {
		return err
	}
	c.put(&e)
	own := c.of(e.Policy)
	if before == nil && own.entries > MaxOverrides-c.live.entries ||
		c.live.bytes > live.bytes && own.bytes > MaxBytes-c.live.bytes {
		c.remove(e.ID)
		if had != nil {
			c.put(had)
		}
		return fmt.Errorf("%w: there may be %d, with %d bytes, and a policy may have no more than are free", ErrFull,
			MaxOverrides, MaxBytes)
	}
	s.Change, s.Before = &e, before
	return nil
}

// of returns the sums of one policy's overrides.
func (c *contents) of(policy string) (n sums) {
	for _, e := range c.entries {
		if e.Policy == policy && !e.Deleted() {
			n.entries, n.bytes = n.entries+1, n.bytes+e.bytes()
		}
	}
	return n
}

// merge takes in the entries of another member that are newer than the book's own. The entries must be valid. known is
// the highest counter of the book before the Commit. Entries whose counter is too high, or for which there is no room,
// are left out.
func (c *contents) merge(s *Step, known uint64) {
	for _, one := range s.Merge {
		e := &one
		var wrong error
		switch has := c.entries[e.ID]; {
		case has != nil && !e.newer(has):
			continue
		case e.Counter > known+maxStep:
			wrong = limit.NewError(limit.Invalid, "counter", "is more than 2^32 above those of this node")
		case !e.Deleted() && (c.live.bytes+e.bytes() > 2*MaxBytes || c.live.entries >= 2*MaxOverrides):
			wrong = fmt.Errorf("%w, with those of other members", ErrFull)
		default:
			c.put(e)
			s.Taken = append(s.Taken, one)
			continue
		}
		if s.Err == nil {
			s.Err = fmt.Errorf("override of policy %.128q: %w", e.Policy, wrong)
		}
	}
}

// write writes the file, if there is one.
func (b *Book) write(text []byte) error {
	if b.file == nil {
		return nil
	}
	b.writes.Add(1)
	err := b.file.Replace(text)
	if err != nil {
		b.writesFailed.Add(1)
	}
	return err
}

// Retry writes the file again if it lacks entries.
func (b *Book) Retry() error {
	b.change.Lock()
	defer b.change.Unlock()
	next := *b.now.Load()
	if next.failed == nil {
		return nil
	}
	next.failed = b.write(next.text)
	b.now.Store(&next)
	return next.failed
}

// Durable reports whether all entries are in the book's file. A book without a file never is.
func (b *Book) Durable() bool { return b.file != nil && b.now.Load().failed == nil }

// Digest returns the digest of the book.
func (b *Book) Digest() Digest { return b.now.Load().digest }

// BookStats has the numbers of a Book.
type BookStats struct {
	Overrides, Deleted, Bytes int
	Durable                   bool
	WriteError                error  // why the file lacks entries that are in force; nil: it has all
	Writes, WritesFailed      uint64 // since the process started
}

// Stats returns the present numbers.
func (b *Book) Stats() BookStats {
	c := b.now.Load()
	return BookStats{
		Overrides: c.live.entries, Deleted: c.deleted.entries, Bytes: c.live.bytes,
		Durable:    b.file != nil && c.failed == nil,
		WriteError: c.failed, Writes: b.writes.Load(), WritesFailed: b.writesFailed.Load(),
	}
}

// Get returns the entry of an override. ok is false if there is no override.
func (b *Book) Get(id ID) (*Entry, bool) {
	e := b.now.Load().entries[id]
	return e, e != nil && !e.Deleted()
}

// After returns the overrides, without deletions, whose IDs are above id, in order; the zero ID is below all.
func (b *Book) After(id ID) iter.Seq[*Entry] {
	return func(yield func(*Entry) bool) {
		all := b.now.Load().sorted
		at, found := slices.BinarySearchFunc(all, id, func(e *Entry, id ID) int { return e.Compare(id) })
		if found {
			at++
		}
		for _, e := range all[at:] {
			if !e.Deleted() && !yield(e) {
				return
			}
		}
	}
}

// Overrides returns all overrides in the form of package policy, in order of their IDs.
func (b *Book) Overrides() []policy.Override {
	list := make([]policy.Override, 0, b.Stats().Overrides)
	for e := range b.After(ID{}) {
		list = append(list, e.Override())
	}
	return list
}
