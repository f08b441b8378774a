package algo

// An Arena is the memory of states. Its layout:
//
//	page   1024 words, cut into blocks of one size class; Arena.mem has the words, Arena.pages what is known of each
//	class  one of 45 block sizes from 2 to 1024 words; at most an eighth of a block of up to 128 words is unused
//	Ref    the page's index above the block's first word in the page (10 bits)
//
// Invariants: page 0 has no memory, so that the zero Ref names no block. The pages of a class that have room for
// another block are a list, of which room has the first. A page without blocks in use becomes a spare page, which any
// class may take next; where there are more than maxSpares, all of them go back to the runtime. Blocks that were freed
// are a list within their page: the first word of each is 1 + the index of the next.

// Ref names a block of words in an Arena. The zero Ref names no block.
type Ref uint32

// Budget is asked before an Arena takes memory and told when it gives some back. A nil Budget never refuses.
type Budget interface {
	// Take reports whether the Arena may take so many more bytes, and counts them when it may.
	Take(bytes int) bool
	// Give takes back what Take counted.
	Give(bytes int)
}

// Page is the unit in which an Arena takes memory and gives it back. It holds no pointers.
type Page [pageWords]uint64

const (
	pageBits  = 10
	pageWords = 1 << pageBits
	// PageBytes is the size of a Page.
	PageBytes = pageWords * 8
	// MaxBlock is the largest block an Arena hands out, in words.
	MaxBlock = pageWords
	// maxSpares bounds the pages without a block in use that an Arena keeps, so that a state that comes and goes does
	// not take a page from the runtime each time.
	maxSpares = 4
)

// blockClasses are the sizes, in words, that blocks come in. Small ones are spaced so that at most an eighth of a
// block is unused; above 128 words they divide a page without a remainder worth speaking of.
var blockClasses = [...]uint16{
	2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48, 52, 56, 60, 64,
	72, 80, 88, 96, 102, 113, 128, 146, 170, 204, 256, 341, 512, 1024,
}

// classFor maps a size in words to the index of the smallest class that holds it.
var classFor = func() (t [MaxBlock + 1]uint8) {
	c := 0
	for n := range t {
		if n > int(blockClasses[c]) {
			c++
		}
		t[n] = uint8(c)
	}
	return t
}()

// page describes a page: a run of words, cut into blocks of one class.
type page struct {
	class      uint8
	live       uint16 // blocks in use
	carved     uint16 // blocks that have ever been in use; those above have not
	free       uint16 // 1 + index of the first freed block; the block's first word continues the list
	prev, next int32  // neighbours in the class's list of pages with room, -1 at an end
}

// Arena is memory for states: blocks of 64-bit words in pages without pointers, so that the work of the garbage
// collector grows with the number of pages (8 KiB each) and not with the number of keys. A page all of whose blocks are
// free can be given back, so that memory that was taken for one size of block does not stay bound to it.
//
// An Arena does not lock: its user does. The zero value is not ready for use, see NewArena.
type Arena struct {
	// mem are the words of the pages, nil for one that has been given back. They are apart from pages because Block
	// reads them alone: for a million keys they take 64 KB.
	mem    []*Page
	pages  []page
	vacant []int32                  // indexes of pages that were given back
	room   [len(blockClasses)]int32 // per class, first page with room, -1 when there is none
	spares []int32                  // pages without a block in use, of no class
	budget Budget
	bytes  int
	inUse  int // words of the blocks in use
}

// NewArena returns an empty Arena that asks budget, which may be nil, before it grows.
func NewArena(budget Budget) *Arena {
	a := &Arena{budget: budget}
	for i := range a.room {
		a.room[i] = -1
	}
	// Page 0 stays empty, so that no block is ever named by the zero Ref.
	a.pages = append(a.pages, page{prev: -1, next: -1})
	a.mem = append(a.mem, nil)
	return a
}

// Bytes is the memory of the pages, in use or not.
func (a *Arena) Bytes() int { return a.bytes }

// InUse is the memory of the blocks that were allocated and not freed, in bytes, their sizes rounded up to those of
// their classes.
func (a *Arena) InUse() int { return a.inUse * 8 }

// Alloc returns a zeroed block of at least the given number of words (1 to MaxBlock), or false when the budget refuses
// a page that would be needed for it.
func (a *Arena) Alloc(words int) (Ref, bool) {
	if words < 1 || words > MaxBlock {
		panic("algo: block size out of range")
	}
	c := classFor[words]
	size := blockClasses[c]
	pi := a.room[c]
	if pi < 0 {
		var ok bool
		if pi, ok = a.grow(c); !ok {
			return 0, false
		}
	}
	p, mem := &a.pages[pi], a.mem[pi]
	var index uint16
	if p.free != 0 {
		index = p.free - 1
		p.free = uint16(mem[int(index)*int(size)])
	} else {
		index = p.carved
		p.carved++
	}
	p.live++
	a.inUse += int(size)
	if p.free == 0 && int(p.carved)+1 > pageWords/int(size) {
		a.unlink(pi)
	}
	off := int(index) * int(size)
	clear(mem[off : off+int(size)])
	return Ref(int(pi)<<pageBits | off), true
}

// Free takes back a block that Alloc returned. words is the size that was asked for then.
func (a *Arena) Free(r Ref, words int) {
	pi := int32(r >> pageBits)
	p := &a.pages[pi]
	size := blockClasses[p.class]
	if p.live == 0 || classFor[words] != p.class {
		panic("algo: block freed twice or with another size")
	}
	full := p.free == 0 && int(p.carved)+1 > pageWords/int(size)
	off := int(r) & (pageWords - 1)
	a.mem[pi][off] = uint64(p.free)
	p.free = uint16(off/int(size)) + 1
	p.live--
	a.inUse -= int(size)
	if full {
		a.link(pi)
	}
	if p.live > 0 {
		return
	}
	a.unlink(pi)
	if a.spares = append(a.spares, pi); len(a.spares) > maxSpares {
		a.Trim()
	}
}

// Block returns the first words of a block: a view that stays valid until the block is freed, also while other blocks
// are allocated.
func (a *Arena) Block(r Ref, words int) []uint64 {
	off := int(r) & (pageWords - 1)
	return a.mem[r>>pageBits][off : off+words : off+words]
}

// Tail is a view of a block and what follows it in its page, for a block that says itself how long it is.
func (a *Arena) Tail(r Ref) []uint64 { return a.mem[r>>pageBits][int(r)&(pageWords-1):] }

// grow gives a class another page: a spare one, or a new one.
func (a *Arena) grow(class uint8) (int32, bool) {
	var pi int32
	if n := len(a.spares); n > 0 {
		pi = a.spares[n-1]
		a.spares = a.spares[:n-1]
	} else {
		if len(a.vacant) == 0 && len(a.pages) >= 1<<(32-pageBits) || a.budget != nil && !a.budget.Take(PageBytes) {
			return 0, false
		}
		pi = a.take()
	}
	a.pages[pi] = page{class: class, prev: -1, next: -1}
	a.link(pi)
	return pi, true
}

// take takes a page from the runtime.
func (a *Arena) take() (pi int32) {
	if n := len(a.vacant); n > 0 {
		pi = a.vacant[n-1]
		a.vacant = a.vacant[:n-1]
	} else {
		pi = int32(len(a.pages))
		a.pages, a.mem = append(a.pages, page{}), append(a.mem, nil)
	}
	a.mem[pi] = new(Page)
	a.bytes += PageBytes
	return pi
}

// Trim gives the spare pages back, and reports whether there were any.
func (a *Arena) Trim() bool {
	spares := a.spares
	for _, pi := range spares {
		a.mem[pi] = nil
		a.bytes -= PageBytes
		if a.budget != nil {
			a.budget.Give(PageBytes)
		}
	}
	a.vacant = append(a.vacant, spares...)
	a.spares = a.spares[:0]
	return len(spares) > 0
}

func (a *Arena) link(pi int32) {
	p := &a.pages[pi]
	p.prev, p.next = -1, a.room[p.class]
	if p.next >= 0 {
		a.pages[p.next].prev = pi
	}
	a.room[p.class] = pi
}

func (a *Arena) unlink(pi int32) {
	p := &a.pages[pi]
	if p.prev >= 0 {
		a.pages[p.prev].next = p.next
	} else {
		a.room[p.class] = p.next
	}
	if p.next >= 0 {
		a.pages[p.next].prev = p.prev
	}
	p.prev, p.next = -1, -1
}
