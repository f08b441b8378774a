// Package control changes a running cluster as operators ask: the overrides of limits, and the keys that encrypt the gossip, the same on all
// members. It also makes the secrets that a cluster begins with.
//
// A [Book] is one member's overrides under versions, so that members that take each other's books in any order and any number of times end
// up with the same one; it is written to a file before it says that it has a change. A [Replicator] tells the other members of changes and
// compares books with them until all are equal; [Overrides] is what operators call. What an override means is package policy's.
//
// It does not promise that all members know an override when the operator is answered (the answer says which ones do), nor that of two
// concurrent changes of one override both are seen (the later version wins on all members, and the answer to the other one says so), nor
// that a deleted override cannot come back with a member that was away while MaxDeleted others were deleted.
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

// Bounds of a Book. What operators set is rejected beyond MaxOverrides and MaxBytes, and where a policy would have more than is left free:
// a policy leaves the others something. What members tell each other is taken in up to twice as much: two sides of a cluster that could not
// reach each other may both have been filled.
const (
	MaxOverrides = 10_000
	MaxBytes     = 2 << 20 // in the book's file
	// MaxDeleted and MaxDeletedBytes bound the deletions that are remembered: of more, the oldest are forgotten.
	MaxDeleted      = 10_000
	MaxDeletedBytes = 2 << 20
)

const (
	maxCounter = 1 << 53 // of a Version: what a JSON number holds exactly
	// maxStep is how far the counter of another member's entry may be above all that a book knows; an empty book knows 0. No cluster makes as
	// many changes in its life, and a member that lies needs days of changes to use up the counters.
	maxStep    = 1 << 32
	maxName    = 128 // bytes of a member's and of a caller's name
	entryBytes = 128 // what an entry takes of a file at most, besides its texts
)

// ID is what an override is for: a key, or the keys that begin with Prefix, of a policy.
type ID struct{ Policy, Key, Prefix string }

// Compare orders IDs by policy, then keys before prefixes.
func (id ID) Compare(other ID) int {
	return cmp.Or(strings.Compare(id.Policy, other.Policy), strings.Compare(id.Prefix, other.Prefix), strings.Compare(id.Key, other.Key))
}

// Version orders the changes of an override. Counter is a Lamport clock (Lamport, 1978): above that of every entry that the node knew
// when it made the change. Node is that node's name.
type Version struct {
	Counter uint64
	Node    string
}

// String returns the version as operators see it, "12@node-a".
func (v Version) String() string { return fmt.Sprintf("%d@%s", v.Counter, v.Node) }

// Entry is the last change of an override.
type Entry struct {
	ID
	Version
	Settings string    // see policy.Override; empty: the override was deleted
	By       string    // who changed it, as the access file names the caller
	At       time.Time // when, by the clock of the node that was asked: for people, nothing is decided by it
}

// Deleted reports whether the entry says that there is no override.
func (e *Entry) Deleted() bool { return e.Settings == "" }

// Override returns an entry that is not Deleted as a policy takes it.
func (e *Entry) Override() policy.Override {
	return policy.Override{Policy: e.Policy, Key: e.Key, Prefix: e.Prefix, Settings: e.Settings}
}

// newer orders entries of one ID. A member that has lost its file may use a counter twice: then the rest of the entry decides, the same
// on all members, a deletion, which has no settings, before everything else.
func (e *Entry) newer(other *Entry) bool {
	return cmp.Or(cmp.Compare(e.Counter, other.Counter), strings.Compare(e.Node, other.Node), strings.Compare(other.Settings, e.Settings),
		strings.Compare(e.By, other.By), e.At.Compare(other.At)) > 0
}

// bytes is what an entry counts for: as much as it can take of a file.
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

// valid says what is wrong with an entry of a file or of another member. The error names the field. Settings are not read: another
// member may have other policies.
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

// inMillis is a time as precise as members tell it to each other.
func inMillis(t time.Time) time.Time { return time.UnixMilli(t.UnixMilli()).UTC() }

// maxMillis is the end of the year 9999 in milliseconds since 1970, beyond which RFC 3339 has no time.
const maxMillis = 253402300799999

// Digest stands for the content of a Book, of whose file it is the SHA-256: members whose digests are equal have the same entries.
type Digest [sha256.Size]byte

// Book is one member's overrides. Its methods are safe for concurrent use.
type Book struct {
	file *reload.Replacer // nil: entries are lost with the process

	change sync.Mutex // held while a change is written: one at a time
	now    atomic.Pointer[contents]

	writes, writesFailed atomic.Uint64
}

// contents are a book's entries, and how it stands with its file. Those of a Book are sealed, and not changed, but replaced by a changed clone.
type contents struct {
	entries       map[ID]*Entry
	live, deleted sums
	counter       uint64 // the highest

	sorted []*Entry
	text   []byte // the file that they make
	digest Digest
	failed error // why the file lacks entries of other members that are in force; nil: it does not
}

// OpenBook returns the book in the file, which is made at the first change. An empty name is a book without one. A file that is not a
// book is an error that says where it goes wrong.
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

// sums are of the overrides there are, or of the deletions.
type sums struct{ entries, bytes int }

// put takes an entry in place of what there is.
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

// count adds or takes away what an entry is in the sums.
func (c *contents) count(e *Entry, sign int) {
	of := &c.live
	if e.Deleted() {
		of = &c.deleted
	}
	of.entries += sign
	of.bytes += sign * e.bytes()
}

// clone returns a copy to make a change in.
func (c *contents) clone() *contents {
	out := *c
	out.entries = maps.Clone(c.entries)
	return &out
}

// forget drops the oldest deletions of which there are too many. Members that have the same entries drop the same ones.
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
	// What is kept are the first ones, whatever follows them: so it does not matter in which order members learn of deletions.
	kept := 0
	for i, e := range dead {
		if kept += e.bytes(); i >= MaxDeleted || kept > MaxDeletedBytes {
			c.remove(e.ID)
		}
	}
}

// seal forgets what there is too much of, and works out what the entries make.
func (c *contents) seal() (err error) {
	c.forget()
	c.sorted = slices.SortedFunc(maps.Values(c.entries), func(a, b *Entry) int { return a.Compare(b.ID) })
	c.text, err = encode(c.sorted)
	c.digest = sha256.Sum256(c.text)
	return err
}

// ErrFull is wrapped by the error for more overrides than a Book takes.
var ErrFull = errors.New("the overrides are full")

// Step is a part of a Commit: a change of this member, or the entries of another one.
type Step struct {
	Merge  []Entry // of another member
	Taken  []Entry // those of Merge that were newer than the book's own
	Change *Entry  // of this one, without a version; Commit gives it one
	// Before is what there was before the Change; nil: nothing. A deletion of what there is not changes nothing and gets no version.
	Before *Entry
	// Err says why the Change was not made, or the first of the entries to merge that were left out.
	Err error
}

// Commit takes steps together, and writes the file once. Of the entries of others those that are newer than the book's own count, and are in
// force even if the file cannot be written: see Durable. A change is not made if it cannot be written. changed says whether the book has
// become another one.
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
		next = merged   // to be written again: the file may have the changes
		_ = next.seal() // all of it was encoded before, by this member or another
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
	if before == nil && own.entries > MaxOverrides-c.live.entries || c.live.bytes > live.bytes && own.bytes > MaxBytes-c.live.bytes {
		c.remove(e.ID)
		if had != nil {
			c.put(had)
		}
		return fmt.Errorf("%w: there may be %d, with %d bytes, and a policy may have no more than are free", ErrFull, MaxOverrides, MaxBytes)
	}
	s.Change, s.Before = &e, before
	return nil
}

// of is what a policy has of the overrides.
func (c *contents) of(policy string) (n sums) {
	for _, e := range c.entries {
		if e.Policy == policy && !e.Deleted() {
			n.entries, n.bytes = n.entries+1, n.bytes+e.bytes()
		}
	}
	return n
}

// merge takes in the entries of another member, which are valid, that are newer than those there are. known is the highest counter of the
// book. Those of versions that are too high, and those that there is no room for, are left out.
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

// Digest returns what stands for the content.
func (b *Book) Digest() Digest { return b.now.Load().digest }

// BookStats are a Book's numbers.
type BookStats struct {
	Overrides, Deleted, Bytes int
	Durable                   bool
	WriteError                error  // why the file lacks entries that are in force; nil: it does not
	Writes, WritesFailed      uint64 // since the process began
}

// Stats returns the numbers of now.
func (b *Book) Stats() BookStats {
	c := b.now.Load()
	return BookStats{
		Overrides: c.live.entries, Deleted: c.deleted.entries, Bytes: c.live.bytes, Durable: b.file != nil && c.failed == nil,
		WriteError: c.failed, Writes: b.writes.Load(), WritesFailed: b.writesFailed.Load(),
	}
}

// Get returns the entry of an override that there is.
func (b *Book) Get(id ID) (*Entry, bool) {
	e := b.now.Load().entries[id]
	return e, e != nil && !e.Deleted()
}

// After returns the overrides, without deletions, above an ID in the order of IDs; the zero ID is below all.
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

// Overrides returns all overrides as policies take them, in order of their IDs.
func (b *Book) Overrides() []policy.Override {
	list := make([]policy.Override, 0, b.Stats().Overrides)
	for e := range b.After(ID{}) {
		list = append(list, e.Override())
	}
	return list
}
