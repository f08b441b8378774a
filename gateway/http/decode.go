package httpapi

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"reflect"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/weirlimit/weir/limit"
)

// This file reads JSON bodies strictly. exchange.decode checks the headers, reads the body within MaxBody, waits for
// memory (admit) and decodes; malformed and wrong turn errors of the JSON library into problems with the API's names of
// fields. operations.go converts the decoded bodies to questions.

// The bodies of requests. An empty string counts as a missing one.
type (
	targetBody struct {
		Policy    string     `json:"policy"`
		Namespace string     `json:"namespace"`
		Limit     *limitBody `json:"limit"`
		Key       string     `json:"key"`
	}
	checkBody struct {
		targetBody
		Cost      *int64 `json:"cost"`
		Partial   bool   `json:"partial"`
		RequestID string `json:"request_id"`
	}
	checksBody struct {
		Checks list[checkBody] `json:"checks"`
		Atomic bool            `json:"atomic"`
	}
	acquireBody struct {
		targetBody
		Cost      *int64 `json:"cost"`
		TTL       string `json:"ttl"`
		RequestID string `json:"request_id"`
	}
	renewBody struct {
		targetBody
		LeaseID string `json:"lease_id"`
		TTL     string `json:"ttl"`
	}
	releaseBody struct {
		targetBody
		LeaseID string `json:"lease_id"`
	}
	amountBody struct {
		Cost  *int64 `json:"cost"`
		Usage usage  `json:"usage"`
	}
	reserveBody struct {
		targetBody
		amountBody
		Class     string `json:"class"`
		TTL       string `json:"ttl"`
		RequestID string `json:"request_id"`
	}
	reservesBody struct {
		Reserves list[reserveBody] `json:"reserves"`
	}
	extendBody struct {
		targetBody
		amountBody
		ReservationID string `json:"reservation_id"`
		TTL           string `json:"ttl"`
		RequestID     string `json:"request_id"`
	}
	extendsBody struct {
		Extends list[extendBody] `json:"extends"`
	}
	commitBody struct {
		targetBody
		amountBody
		ReservationID string `json:"reservation_id"`
		Overrun       string `json:"overrun"`
		Class         string `json:"class"`
	}
	commitsBody struct {
		Commits list[commitBody] `json:"commits"`
	}
	chargeBody struct {
		targetBody
		amountBody
		RequestID string `json:"request_id"`
	}
	cancelBody struct {
		targetBody
		ReservationID string `json:"reservation_id"`
	}
	refundBody struct {
		targetBody
		Cost      *int64 `json:"cost"`
		RequestID string `json:"request_id"`
	}
)

// given says whether the body has a cost or a usage.
func (b *amountBody) given() bool { return b.Cost != nil || b.Usage != nil }

// list is a list of a batch. It reads at most limit.MaxBatch elements, because a body of "{},{},…" would take many
// times its size in memory.
type list[T any] []T

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (l *list[T]) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	return elements(dec, '[', ']', reflect.TypeFor[[]T](), limit.MaxBatch, "elements fit in one batch", func() error {
		*l = append(*l, *new(T))
		return json.UnmarshalDecode(dec, &(*l)[len(*l)-1])
	})
}

// usage is a limit.Usage. It reads at most limit.MaxClasses classes, for the same reason as list.
type usage limit.Usage

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (u *usage) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	*u = make(usage)
	return elements(dec, '{', '}', reflect.TypeFor[usage](), limit.MaxClasses, "classes are taken", func() error {
		var class string
		var n int64
		err := cmp.Or(json.UnmarshalDecode(dec, &class), json.UnmarshalDecode(dec, &n))
		(*u)[class] = n
		return err
	})
}

// elements reads an array or object of the Go type of; one reads an element. The error for more than most elements is a
// *limit.Error that says of what so many are taken.
func elements(dec *jsontext.Decoder, begin, end jsontext.Kind, of reflect.Type, most int, what string,
	one func() error) error {
	if k := dec.PeekKind(); k != begin {
		return cmp.Or[error](dec.SkipValue(), &json.SemanticError{JSONKind: k, GoType: of})
	}
	_, err := dec.ReadToken()
	for n := 0; err == nil && dec.PeekKind() != end; n++ {
		if n == most {
			return limit.NewError(limit.TooLarge, "", fmt.Sprintf("at most %d %s", most, what))
		}
		err = one()
	}
	if err == nil {
		_, err = dec.ReadToken()
	}
	return err
}

// decode reads the request's body into v.
func (x *exchange) decode(v any) *problem {
	if p := cmp.Or(encoding(x.r.Header), mediaType(x.r.Header)); p != nil {
		return p
	}
	if err := x.read(x.MaxBody); err != nil {
		if large, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return &problem{status: http.StatusRequestEntityTooLarge,
				message: fmt.Sprintf("the body is larger than %d bytes", large.Limit)}
		}
		return invalid("", "the body could not be read to its end")
	}
	size := int64(x.in.Len())
	if err := x.admit(size*perByte + min(size/leastCheck, limit.MaxBatch)*perCheck); err != nil {
		return problemOf(err)
	}
	body := x.in.Bytes()
	if len(bytes.TrimSpace(body)) == 0 {
		return invalid("", "the body is empty; it must be a JSON object")
	}
	if err := json.Unmarshal(body, v, json.RejectUnknownMembers(true)); err != nil {
		return malformed(err)
	}
	// The library reads null as a zero value, which would make a cost a free peek.
	if bytes.Contains(body, []byte("null")) {
		if at, found := findNull(body); found {
			return wrong(at, "must not be null")
		}
	}
	return nil
}

// read reads the request's body, which may have most bytes. The error for a longer one is an *http.MaxBytesError.
func (x *exchange) read(most int64) error {
	x.in.Reset()
	if x.r.ContentLength > most { // no need to read any of it
		return &http.MaxBytesError{Limit: most}
	}
	_, err := x.in.ReadFrom(&countedBody{x, http.MaxBytesReader(x.w, x.r.Body, most)})
	return err
}

func unsupported(message string) *problem {
	return &problem{status: http.StatusUnsupportedMediaType, message: message}
}

// encoding rejects a body with a content coding. It looks at each Content-Encoding field of the header.
func encoding(h http.Header) *problem {
	for _, e := range h["Content-Encoding"] {
		if e != "" && !strings.EqualFold(e, "identity") {
			return unsupported("the body must not be compressed: Content-Encoding is " + clip(strconv.Quote(e)))
		}
	}
	return nil
}

// mediaType accepts application/json with no charset or UTF-8.
func mediaType(h http.Header) *problem {
	values := h["Content-Type"]
	if len(values) == 1 && values[0] == "application/json" {
		return nil
	}
	const help = "; send it with -H 'Content-Type: application/json'"
	if len(values) != 1 {
		return unsupported("the body needs exactly one Content-Type" + help)
	}
	kind, params, err := mime.ParseMediaType(values[0])
	if err != nil || kind != "application/json" {
		return unsupported("the body's Content-Type is " + clip(strconv.Quote(values[0])) + help)
	}
	if c, ok := params["charset"]; ok && !strings.EqualFold(c, "utf-8") {
		return unsupported("the body has to be UTF-8, not " + clip(strconv.Quote(c)))
	}
	return nil
}

// malformed converts an error of the JSON library.
func malformed(err error) *problem {
	if syntactic, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		if errors.Is(err, jsontext.ErrDuplicateName) {
			return wrong(syntactic.JSONPointer, "is given twice")
		}
		return wrong(syntactic.JSONPointer, fmt.Sprintf("is not valid JSON: %s after byte %d",
			clip(fmt.Sprint(syntactic.Err)), syntactic.ByteOffset))
	}
	semantic, ok := errors.AsType[*json.SemanticError](err)
	if !ok {
		return invalid("", "the body is not valid JSON: "+clip(err.Error()))
	}
	at := semantic.JSONPointer
	if tooMany, ok := errors.AsType[*limit.Error](err); ok {
		return &problem{status: http.StatusRequestEntityTooLarge, field: fieldAt(at), message: tooMany.Message}
	}
	if errors.Is(err, json.ErrUnknownName) {
		return invalid(fieldAt(at), "there is no such field here")
	}
	kind := reflect.Invalid
	if semantic.GoType != nil {
		kind = semantic.GoType.Kind()
	}
	var want string
	switch kind {
	case reflect.String:
		want = "a string"
	case reflect.Bool:
		want = "true or false"
	case reflect.Int8, reflect.Int32, reflect.Int64:
		want = "a whole number of at most " + strconv.Itoa(semantic.GoType.Bits()) +
			" bits, without fraction or exponent"
	case reflect.Slice:
		want = "an array"
	default:
		want = "an object"
	}
	return wrong(at, "must be "+want)
}

// wrong returns the problem of a place in the body. message is about the field there or, at the root, the body.
func wrong(at jsontext.Pointer, message string) *problem {
	field := fieldAt(at)
	if field == "" {
		message = "the body " + message
	}
	return invalid(field, message)
}

// findNull finds the first null in valid JSON.
func findNull(body []byte) (jsontext.Pointer, bool) {
	dec := jsontext.NewDecoder(bytes.NewReader(body))
	for {
		switch tok, err := dec.ReadToken(); {
		case err != nil:
			return "", false
		case tok.Kind() == 'n':
			return dec.StackPointer(), true
		}
	}
}

// fieldAt returns a place in the body as problems name it: checks[3].limit.window for /checks/3/limit/window.
func fieldAt(at jsontext.Pointer) string {
	var b strings.Builder
	for token := range at.Tokens() {
		switch {
		case b.Len() == 0:
			b.WriteString(token)
		case strings.Trim(token, "0123456789") == "":
			b.WriteString("[" + token + "]")
		default:
			b.WriteString("." + token)
		}
	}
	return clip(b.String())
}

// clip shortens a caller's text for a message.
func clip(s string) string {
	const most = 128
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
